"""Two sequences of 4 and 1 new tokens share a paged cache; each attends to its own tokens."""

import numpy as np

import octavo

tokens, heads, kv_heads, head_size, blocks, block_size = 5, 4, 2, 64, 8, 16
query = np.full((tokens, heads * head_size), 0.5, np.float32)
key = value = np.full((tokens, kv_heads * head_size), 0.25, np.float32)
key_cache = np.zeros((blocks, block_size, kv_heads, head_size), np.float32)
value_cache = np.zeros_like(key_cache)
token_offsets = np.array([0, 4, 5], np.int32)
past_lengths = np.zeros(2, np.int32)
block_table = np.array([[3], [1]], np.int32)

call = (query, key, value, key_cache, value_cache, token_offsets, past_lengths, block_table)
sizes = {"num_heads": heads, "kv_num_heads": kv_heads}
output, lse = octavo.paged_attention(*call, **sizes, return_lse=True)
print("every value is", output[-1, -1])  # 0.25: the average of equal values
print("computed by", next(row["backend"] for row in octavo.explain_call(*call, **sizes) if not row["refusal"]))
