"""An HTTP server in front of a `DecodeEngine`, with the API of OpenAI's completions.

- `app.py`: the routes; `generation.py`: one request, from its body to the last byte of its answer;
- `form.py`, `text_form.py`, `chat_form.py`: what a request may hold;
- `answers.py`: what is sent back; `logprobs.py`: its log-probabilities; `errors.py`: refusals;
  `tokens.py`: what is asked of a tokenizer;
- `door.py`: what all requests share, and how many may be there; `metrics.py`: what is counted;
- `server.py`: connections that stall, and how the server ends.
"""
