"""Families: which one a model belongs to, and what is asked of it."""

from meshwright.data.packing import IGNORE as READ
from meshwright.models.diffusion_gemma.block_diffusion import BlockDiffusion
from meshwright.models.families.listed import FAMILIES, family_named, family_of
from meshwright.models.objective import NextToken
from meshwright.models.specs.registry import registered_strategies
from meshwright.models.token_loss import IGNORE
from tests.tiny import Plain, make, tiny_model


def test_a_model_is_of_the_family_that_its_class_inherits_from() -> None:
    model, _ = make("diffusion_gemma", meta=True)
    assert family_of(model) is family_named("diffusion_gemma")
    assert family_of(model).objective() is BlockDiffusion
    model.__class__ = type("Mine", (type(model),), {})
    assert family_of(model) is family_named("diffusion_gemma")


def test_others_are_causal_language_models() -> None:
    from transformers import AutoModelForCausalLM

    default = family_named("llama")
    assert default not in FAMILIES
    assert default.objective() is NextToken
    assert default.auto_class() is AutoModelForCausalLM
    assert family_of(tiny_model(meta=True)) is family_of(Plain()) is default


def test_names_are_those_of_one_family_and_have_its_strategy() -> None:
    names = [name for family in FAMILIES for name in (family.name, *family.classes)]
    assert len(names) == len(set(names))
    strategies = {name: family.strategy for family in FAMILIES for name in family.classes}
    assert {name: type(item) for name, item in registered_strategies().items() if name in strategies} == strategies


def test_the_loader_and_the_loss_ignore_the_same_label() -> None:
    assert READ == IGNORE
