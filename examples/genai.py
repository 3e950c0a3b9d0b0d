"""Streams an answer with onnxruntime-genai's engine API: python genai.py MODEL_DIR PROMPT (`octavo convert` makes one).

The engine is the only API that runs paged models: og.Generator fails on them ("Invalid rank for input: input_ids").
"""

import json
import sys

import numpy as np
import onnxruntime_genai as og

import octavo

model_dir, question = sys.argv[1:] if len(sys.argv) == 3 else sys.exit("usage: python genai.py MODEL_DIR PROMPT")
model = og.Model(octavo.genai_config(model_dir))
tokenizer, engine = og.Tokenizer(model), og.Engine(model)
messages = json.dumps([{"role": "user", "content": question}])
prompt = tokenizer.encode(tokenizer.apply_chat_template(messages=messages, add_generation_prompt=True))
request = engine.create_request()  # keep it: the engine silently drops a request that Python has forgotten
turn = og.TurnOptions(request)
turn.set_max_generated_tokens(64)
request.begin_turn(np.asarray(prompt, np.int32), turn)
stream, events = tokenizer.create_stream(), engine.create_event_buffer(16)
while engine.has_pending_requests():
    for event in engine.run(events):  # one step for all requests
        if event.flags & og.EngineEventFlags.FAILED:
            engine.run(events)  # the event has a code only; a failed engine raises its reason
        if event.flags & og.EngineEventFlags.TOKEN:
            print(stream.decode(event.token), end="", flush=True)
print()
