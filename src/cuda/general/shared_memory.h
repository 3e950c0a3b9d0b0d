// Shared memory of the general attention kernel: one layout for host (how much) and device (where).
#pragma once

#include "cuda/call.h"

namespace octavo::cuda {

struct SharedLayout {
  int row_stride = 0, value_stride = 0, score_stride = 0, weight_stride = 0;  // elements
  int query = 0, keys = 0, values = 0, scores = 0, weights = 0, key_offsets = 0, value_offsets = 0, row_state = 0,
      live_keys = 0, hull = 0;  // bytes
  int bytes = 0;
};

// Channels of a 16-bit row are padded with zeros to whole tensor-core steps of 16. 16 bytes more (an odd multiple of
// them in all) put consecutive rows into different banks for every access of the kernel.
OCTAVO_HOST_DEVICE constexpr int padded_width(int element_bytes, int width) {
  return element_bytes == 2 ? (width + 15) / 16 * 16 : width;
}

// Floats and integers of a row's state (RowState in kernel.cuh).
inline constexpr int kRowStateWords = 8;

OCTAVO_HOST_DEVICE constexpr SharedLayout shared_layout(int element_bytes, int rows, int keys, int head_size,
                                                        int v_head_size, bool latent) {
  SharedLayout layout;
  int used = 0;
  const auto take = [&used](int bytes) {
    const int at = used;
    used = (used + bytes + 15) / 16 * 16;
    return at;
  };
  const int pad = 16 / element_bytes;
  layout.row_stride = padded_width(element_bytes, head_size) + pad;
  layout.value_stride = latent ? layout.row_stride : padded_width(element_bytes, v_head_size) + pad;
  layout.score_stride = keys + 4;
  layout.weight_stride = element_bytes == 2 ? keys + 8 : layout.score_stride;
  layout.query = take(rows * layout.row_stride * element_bytes);
  layout.keys = take(keys * layout.row_stride * element_bytes);
  layout.values = latent ? layout.keys : take(keys * layout.value_stride * element_bytes);
  layout.scores = take(rows * layout.score_stride * 4);
  layout.weights = element_bytes == 2 ? take(rows * layout.weight_stride * 2) : layout.scores;
  layout.key_offsets = take(2 * keys * 8);
  layout.value_offsets = take(2 * keys * 8);
  layout.row_state = take(kRowStateWords * rows * 4);
  layout.live_keys = take(4 * 4);
  layout.hull = take(2 * 4);
  layout.bytes = used;
  return layout;
}

}  // namespace octavo::cuda
