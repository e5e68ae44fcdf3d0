"""DiffusionGemma: block diffusion with an encoder and a decoder that share their weights. The model is transformers' own.

- `family.py`: what the rest of the house asks of it.
- `objective.py`: what a training step denoises; `options.py`: what a run may choose of that.
- `canvas.py`: where the blocks of a response lie; `corruption.py`: the noise on them; `masks.py`: who sees whom.
- `model.py`: the three passes of a training step, in one call of the model.
- `generation.py`: text that becomes clearer step by step.
- `strategy.py`: how the model is sharded.
"""
