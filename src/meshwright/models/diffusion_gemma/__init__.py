"""DiffusionGemma: block diffusion with an encoder and a decoder that share their weights. The model is that of transformers.

- `family.py`: the family, as the rest of the package sees it.
- `objective.py`: what a training step denoises; `options.py`: the options of a run for that.
- `canvas.py`: the positions of the blocks of a response; `corruption.py`: the noise on them; `masks.py`: which tokens see
  which.
- `canvas_columns.py`: the canvases of a batch, and the columns of them that a rank of `cp` has.
- `stack_traces.py`: how the attentions of both stacks are called; `stack_stages.py`: where they can be cut.
- `stage_passes.py`: the three passes through the stages of a pipeline.
- `model.py`: the three passes of a training step, in one call of the model.
- `generation.py`: generation of text in denoising steps.
- `strategy.py`: how the model is sharded.
"""
