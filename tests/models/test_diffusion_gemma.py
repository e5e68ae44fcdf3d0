"""DiffusionGemma: canvases, noise and masks, and the training forward against the unmodified model, block by block."""

import dataclasses
from typing import Any

import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.models.diffusion_gemma.block_diffusion import BlockDiffusion
from meshwright.models.diffusion_gemma.block_diffusion_options import DiffusionConfig
from meshwright.models.diffusion_gemma.canvas import HIDDEN, lay_out
from meshwright.models.diffusion_gemma.canvas_columns import flat
from meshwright.models.diffusion_gemma.corruption import Draw, corrupt, draw, one_block
from meshwright.models.diffusion_gemma.generation import Draft, continue_text
from meshwright.models.diffusion_gemma.masks import as_additive, block_causal_masks
from meshwright.models.diffusion_gemma.model import enable
from meshwright.models.token_loss import IGNORE, token_loss_sum
from tests.diffusion_gemma import TOKENS, texts, tiny_diffusion_gemma
from tests.harness import run_ranks

LENGTH = 8
VOCABULARY = TOKENS["vocab_size"]
ROWS, TOKENS_IN_ROW = 3, 30
PROMPTS = (1, 7, 15)


def objective(**options: Any) -> BlockDiffusion:
    return BlockDiffusion(DiffusionConfig(**options), 0, LENGTH, VOCABULARY, TOKENS_IN_ROW)


def batch(**options: Any) -> dict[str, torch.Tensor]:
    [made] = objective(**options).training([texts(ROWS, TOKENS_IN_ROW, PROMPTS)], [range(ROWS)])
    return flat(made)


# -- canvases ------------------------------------------------------------------------------------------------------------------


def laid_out(labels: list[int], *, fill: bool = True, end: int | None = None) -> tuple[list[int], list[int], list[int]]:
    """Ids, labels and blocks of one sequence of tokens 10, 11, ... with these labels valid."""
    ids = torch.arange(10, 10 + len(labels))[None]
    shifted = torch.where(torch.tensor([labels]) > 0, ids.roll(-1), IGNORE)
    canvas = lay_out(ids, shifted, 4, fill=fill, end=end)
    return canvas.ids[0].tolist(), canvas.labels[0].tolist(), canvas.blocks[0].tolist()


def test_a_text_is_all_response_but_its_first_token() -> None:
    assert laid_out([1, 1, 1, 1, 0]) == ([11, 12, 13, 14], [11, 12, 13, 14], [1] * 4)


def test_what_ends_within_its_last_block_is_filled_up_with_its_last_token() -> None:
    ids, labels, blocks = laid_out([0, 1, 1, 1, 1, 1, 0, 0, 0])
    assert ids == labels == [12, 13, 14, 15, 16, 16, 16, 16]
    assert blocks == [2] * 4 + [6] * 4
    ids, labels, blocks = laid_out([0, 1, 1, 1, 1, 1, 0, 0, 0], fill=False)
    assert labels == [12, 13, 14, 15, 16, *[IGNORE] * 3]
    assert blocks == [2] * 4 + [6] + [HIDDEN] * 3


def test_what_may_have_been_cut_off_is_not_filled_up() -> None:
    assert laid_out([1] * 5 + [0])[1] == [11, 12, 13, 14, 15, *[IGNORE] * 3]
    padded = [1] * 5 + [0, 0, 0]  # to a multiple of some length, behind a sequence of 6
    assert laid_out(padded, end=6)[1] == [11, 12, 13, 14, 15, *[IGNORE] * 3]


def test_the_response_of_a_chat_is_its_last_reply() -> None:
    ids, _, blocks = laid_out([0, 1, 1, 0, 0, 1, 1, 1, 1, 0])
    assert (ids, blocks) == ([16, 17, 18, 19], [6] * 4)


def test_a_sequence_without_labels_has_hidden_columns_only() -> None:
    assert laid_out([0] * 6) == ([0] * 4, [IGNORE] * 4, [HIDDEN] * 4)


# -- noise ---------------------------------------------------------------------------------------------------------------------


def draws(*numbers: int, **changes: Any) -> list[Draw]:
    settings = {"minimum": 0.3, "self_conditioning": 0.5, **changes}
    return [draw(0, number, 32, VOCABULARY, **settings) for number in numbers]


def test_only_supervised_positions_change() -> None:
    item = texts(ROWS, TOKENS_IN_ROW, PROMPTS)
    canvas = lay_out(item["input_ids"], item["labels"], LENGTH, fill=True)
    changed = corrupt(canvas, draws(0, 1, 2, rate=1.0)).ids != canvas.ids
    assert changed.float().mean() > 0.5
    assert not changed[canvas.labels == IGNORE].any()
    assert torch.equal(corrupt(canvas, draws(0, 1, 2, rate=0.0)).ids, canvas.ids)


def test_noise_is_that_of_the_sequence_whatever_the_batch() -> None:
    item = texts(4, TOKENS_IN_ROW)
    alone = objective().training([{k: v[i : i + 1] for k, v in item.items()} for i in range(4)], [[i] for i in (8, 9, 10, 11)])
    pairs = objective().training([{k: v[i : i + 2] for k, v in item.items()} for i in (0, 2)], [range(8, 10), range(10, 12)])
    for name in alone[0]:
        assert torch.equal(torch.cat([one[name] for one in alone]), torch.cat([two[name] for two in pairs]))
    other = objective().training([item], [range(12, 16)])[0]
    assert not torch.equal(other["canvas_ids"], torch.cat([one["canvas_ids"] for one in alone]))


def test_rates_go_from_the_smallest_to_one() -> None:
    rates = torch.tensor([item.rate for item in draws(*range(400))])
    assert 0.3 <= rates.min() < 0.31
    assert 0.99 < rates.max() <= 1
    assert abs(float(rates.mean()) - 0.65) < 0.03
    coins = [item.conditioned for item in draws(*range(400))]
    assert 160 < sum(coins) < 240
    assert not any(item.conditioned for item in draws(*range(50), self_conditioning=0.0))


def test_one_block_has_the_noise_that_it_has_among_all() -> None:
    every, one = batch(), batch(mode="one_block")
    assert one["canvas_ids"].shape == (ROWS, LENGTH)
    for row in range(ROWS):
        seen = one["canvas_blocks"][row] != HIDDEN
        columns = every["canvas_blocks"][row] == one["canvas_blocks"][row, 0]
        for name in ("canvas_ids", "canvas_labels", "canvas_positions"):
            assert torch.equal(every[name][row][columns], one[name][row][seen])


def test_every_block_is_drawn() -> None:
    item = texts(1, TOKENS_IN_ROW)
    canvas = lay_out(item["input_ids"], item["labels"], LENGTH, fill=True)
    found = set()
    for number in range(40):
        drawn = draws(number)
        found.add(int(one_block(canvas, corrupt(canvas, drawn), drawn, LENGTH)[0].blocks[0, 0]))
    assert found == {1, 9, 17, 25}


def test_held_out_sequences_have_fixed_rates() -> None:
    item = texts(8, TOKENS_IN_ROW)
    first, again = (flat(objective().held_out(item, range(8))) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    one, same = (flat(objective(mode="one_block").held_out(item, range(8))) for _ in range(2))
    assert one["canvas_ids"].shape == (8, LENGTH)
    assert all(torch.equal(one[name], same[name]) for name in one)
    changed = (first["canvas_ids"] != first["canvas_labels"]).float().mean(dim=1)
    assert changed[0] < 0.3 < 0.7 < changed[7]


# -- masks ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [3, 8, 100])
def test_masks_column_by_column(window: int) -> None:
    blocks = torch.tensor([[2, 2, 6, 6, HIDDEN], [1, 1, 5, HIDDEN, HIDDEN]])
    masks = block_causal_masks(blocks, 10, window)
    assert {name: mask.shape for name, mask in masks.items()} == dict.fromkeys(masks, (2, 1, 5, 15))
    for row in range(2):
        for query in range(5):
            begin = int(blocks[row, query])
            own = [int(other) == begin for other in blocks[row]]
            assert masks["full_attention"][row, 0, query].tolist() == [key < begin for key in range(10)] + own
            near = [begin - window < key < begin for key in range(10)]
            assert masks["sliding_attention"][row, 0, query].tolist() == near + own
    assert all(mask.any(dim=-1).all() for mask in masks.values())  # no softmax over nothing


def test_eager_attention_adds() -> None:
    added = as_additive(torch.tensor([True, False]), torch.bfloat16)
    assert added.dtype == torch.bfloat16
    assert added.tolist() == [0.0, torch.finfo(torch.bfloat16).min]


# -- the training forward ------------------------------------------------------------------------------------------------------


def block_by_block(model: Any, item: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the canvases from one forward of the unmodified model (two, with self-conditioning) for each block."""
    logits = torch.zeros(*item["canvas_ids"].shape, VOCABULARY)
    for row, blocks in enumerate(item["canvas_blocks"].tolist()):
        for begin in sorted(set(blocks) - {HIDDEN}):
            columns = [column for column, block in enumerate(blocks) if block == begin]
            given = {
                "input_ids": item["input_ids"][row : row + 1, :begin],
                "decoder_input_ids": item["canvas_ids"][row : row + 1, columns],
            }
            found = model(**given).logits
            if item["self_conditioned"][row]:
                found = model(**given, self_conditioning_logits=found).logits
            logits[row, columns] = found[0]
    return logits


@pytest.mark.sampled(4)
@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", ["all_blocks", "one_block"])
@pytest.mark.parametrize("conditioning", [0.0, 0.5, 1.0])
def test_all_blocks_at_once_are_one_forward_of_the_model_for_each(attention: str, mode: str, conditioning: float) -> None:
    model = tiny_diffusion_gemma(attention)
    item = batch(mode=mode, self_conditioning=conditioning)
    expected = block_by_block(model, item)
    enable(model)
    found = model(denoise=item)
    seen = item["canvas_blocks"] != HIDDEN
    assert expected[seen].abs().max() > 0.1
    assert (found.logits - expected)[seen].abs().max() < 1e-5
    assert torch.isfinite(found.logits).all()
    assert torch.equal(block_by_block(model, item), expected)  # without `denoise` the model is what it was


@torch.no_grad()
def test_the_encoder_says_the_next_token() -> None:
    model, item = tiny_diffusion_gemma(), batch()
    hidden = model.model.encoder(item["input_ids"]).last_hidden_state
    enable(model)
    expected = torch.tanh(model.lm_head(hidden) / 30) * 30
    assert torch.allclose(model(denoise=item, encoder_loss=lambda logits: logits).encoder_loss, expected, atol=1e-6)
    assert model(denoise=item).encoder_loss is None


@torch.no_grad()
def test_nothing_leaks_into_a_block() -> None:
    """Columns 9 to 16 of the first sequence are a block: its clean copy and what comes later do not reach it."""
    model, item = tiny_diffusion_gemma(), batch(self_conditioning=1.0)
    enable(model)
    block = slice(8, 16)
    assert item["canvas_blocks"][0, block].tolist() == [9] * 8

    def moved(name: str, columns: slice) -> float:
        changed = {**item, name: item[name].clone()}
        changed[name][0, columns] = (changed[name][0, columns] + 5) % VOCABULARY
        return float((model(denoise=changed).logits - model(denoise=item).logits)[0, block].abs().max())

    assert moved("input_ids", slice(9, 17)) < 1e-6  # the clean copy of the block
    assert moved("input_ids", slice(17, TOKENS_IN_ROW)) < 1e-6  # clean text behind it
    assert moved("canvas_ids", slice(16, 32)) < 1e-6  # later blocks
    assert moved("canvas_ids", slice(0, 8)) < 1e-6  # noised copies of earlier ones
    assert moved("input_ids", slice(4, 9)) > 1e-3  # clean text before it
    assert moved("canvas_ids", slice(8, 9)) > 1e-3  # the block itself


@torch.no_grad()
def test_the_draft_reaches_those_who_drew_it_alone() -> None:
    model, item = tiny_diffusion_gemma(), batch(self_conditioning=0.0)
    enable(model)
    without = model(denoise=item).logits
    coins = torch.tensor([[True], [False], [True]])
    difference = (model(denoise={**item, "self_conditioned": coins}).logits - without).abs().amax(dim=(1, 2))
    assert difference[1] < 1e-6
    assert min(difference[0], difference[2]) > 1e-3


def test_the_encoder_runs_once_and_the_draft_builds_no_graph() -> None:
    model, item = tiny_diffusion_gemma(), batch()
    enable(model)
    calls: list[tuple[str, bool]] = []
    for name in ("model.encoder", "model.decoder"):
        model.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: calls.append((name, output.last_hidden_state.requires_grad))
        )
    model.register_forward_hook(lambda *_: calls.append(("root", True)))
    model(denoise=item)
    assert calls == [("model.encoder", True), ("model.decoder", False), ("model.decoder", True), ("root", True)]


# -- the loss ------------------------------------------------------------------------------------------------------------------


def _losses(model: Any, plan: BlockDiffusion, item: dict[str, torch.Tensor]) -> torch.Tensor:
    counts = torch.tensor(plan.counts([item]))
    return plan.combine(plan.sums(model, item), counts) / counts[0]


def _gradients(rank: int, weight: float, mode: str) -> None:
    """The loss and its gradient, against a plain implementation that goes from block to block."""
    item = batch(encoder_loss_weight=weight, mode=mode)
    plain, fast = tiny_diffusion_gemma(), tiny_diffusion_gemma()
    plan = objective(encoder_loss_weight=weight, mode=mode)

    def detached_block_by_block() -> torch.Tensor:
        inner = plain.forward

        def forward(**given: Any) -> Any:
            if (draft := given.get("self_conditioning_logits")) is not None:
                given["self_conditioning_logits"] = draft.detach()
            return inner(**given)

        return block_by_block(forward, item)

    total = token_loss_sum(detached_block_by_block(), item["canvas_labels"]) / (item["canvas_labels"] != IGNORE).sum()
    hidden = plain.model.encoder(item["input_ids"]).last_hidden_state
    says = torch.tanh(plain.lm_head(hidden) / 30) * 30
    total = total + weight * token_loss_sum(says, item["labels"]) / (item["labels"] != IGNORE).sum()
    total.backward()

    plan.attach(fast)
    loss = _losses(fast, plan, item)
    loss.backward()
    assert abs(float(loss.detach() - total.detach())) < 1e-5
    for (name, found), (_, expected) in zip(fast.named_parameters(), plain.named_parameters(), strict=True):
        if "vision" in name:
            assert found.grad is None
            continue
        assert found.grad is not None, name
        error = (found.grad - expected.grad).abs().max() / expected.grad.abs().max().clamp(min=1e-6)
        assert error < 1e-4, f"{name}: {float(error)}"


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("mode", ["all_blocks", "one_block"])
def test_the_gradient_is_that_of_a_plain_implementation(weight: float, mode: str) -> None:
    run_ranks(_gradients, 1, weight, mode, group=False)


def _without_encoder_loss(rank: int) -> None:
    model, plan = tiny_diffusion_gemma(), objective(encoder_loss_weight=0.0)
    plan.attach(model)
    assert plan.terms == ("denoising",)
    reached: list[bool] = []

    def watch(_: Any, __: Any, output: Any) -> None:
        output.last_hidden_state.register_hook(lambda grad: reached.append(bool((grad == 0).all())))

    model.model.encoder.register_forward_hook(watch)
    _losses(model, plan, batch(encoder_loss_weight=0.0)).backward()
    assert reached == [True]  # a gradient of zeros: what waits for it does not wait in vain


def test_without_a_loss_of_the_encoder_its_output_still_gets_a_gradient() -> None:
    run_ranks(_without_encoder_loss, 1, group=False)


def _order_of_backward(rank: int, weight: float) -> None:
    model, plan = tiny_diffusion_gemma(), objective(encoder_loss_weight=weight)
    plan.attach(model)
    order: list[str] = []

    def watch(name: str) -> Any:
        def on_output(_: Any, __: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: order.append(name))

        return on_output

    for name in ("encoder.language_model", "decoder"):
        for number, layer in enumerate(model.model.get_submodule(f"{name}.layers")):
            layer.register_forward_hook(watch(f"{name[:7]} {number}"))
    _losses(model, plan, batch(encoder_loss_weight=weight)).backward()
    assert order == ["decoder 1", "decoder 0", "encoder 1", "encoder 0"]


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_backward_goes_through_the_decoder_and_then_through_the_encoder(weight: float) -> None:
    """So that FSDP gathers the layers of the encoder when it is their turn, and not all through the backward of the decoder."""
    run_ranks(_order_of_backward, 1, weight, group=False)


def test_counts_are_of_what_is_learned() -> None:
    item = batch(fill_last_block=False)
    assert objective().counts([item, item]) == [2 * (29 + 23 + 15)] * 2
    filled = batch()
    assert objective(encoder_loss_weight=0).counts([filled]) == [29 + 23 + 15]  # they go on to the end: nothing to fill


# -- generation ----------------------------------------------------------------------------------------------------------------


class _Letters:
    """A tokenizer of sorts."""

    eos_token_id, pad_token_id = 2, 0

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("A") + int(token) % 26) for token in ids)


@pytest.mark.thorough
@torch.no_grad()
def test_drafts_become_surer() -> None:
    model = tiny_diffusion_gemma().eval()
    model.lm_head.weight.mul_(3)  # random weights are not sure of anything; these are of some tokens
    torch.manual_seed(0)
    seen: list[Draft] = []
    text = continue_text(model, _Letters(), torch.tensor([[5, 6, 7]]), 12, steps=12, show=seen.append)
    assert len(text) <= 12
    assert [draft.step for draft in seen if draft.canvas == 0] == list(range(1, 1 + sum(d.canvas == 0 for d in seen)))
    assert {draft.canvas for draft in seen} == {0, 1}
    first = [draft for draft in seen if draft.canvas == 0]
    assert first[-1].entropy < first[0].entropy
    assert first[-1].uncertain <= first[0].uncertain


def test_a_draft_shows_what_is_certain() -> None:
    draft = Draft(0, 1, [0, 1, 2, 3], [True, False, True, True], 0.5)
    assert (draft.uncertain, draft.text(_Letters())) == (1, "A·CD")
    assert dataclasses.replace(draft, certain=[False] * 4).text(_Letters()) == "····"


def test_denoising_needs_a_temperature() -> None:
    with pytest.raises(ConfigError, match=r"temperature=0.*must be above 0"):
        continue_text(tiny_diffusion_gemma(), _Letters(), torch.tensor([[5]]), temperature=0.0)
