"""Answers are kept for the latest arguments, told apart by identity."""

from meshwright.once import LATEST, once_for_each


def test_each_pair_of_objects_is_asked_once() -> None:
    calls: list[tuple[list[int], ...]] = []

    @once_for_each
    def total(*lists: list[int]) -> int:
        calls.append(lists)
        return sum(map(sum, lists))

    one, same = [1, 2], [1, 2]
    assert [total(one, same), total(one, same), total(same, one), total(one)] == [6, 6, 6, 3]
    assert len(calls) == 3  # equal lists are not the same ones
    for _ in range(LATEST - 1):
        total([])
        total(one, same)
    assert calls.count((one, same)) == 2  # with (same, one), which is equal: what is asked for again stays
    total(same, one)
    assert calls.count((same, one)) == 3
