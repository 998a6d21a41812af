"""Blocks are counted rightly whatever happens to sequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.engine.block_manager import BlockManager
from jigsawrl.engine.sequence import Owner, Sequence
from jigsawrl.engine.types import Generated, SampleKey, SamplingParams

OWNERS = [Owner(0), Owner(1)]
Contents = dict[int, tuple[Owner, tuple[int, ...]]]
"""For whom, and for which whole prefix, a block was written."""


def sequence(tokens: list[int], owner: Owner = OWNERS[0]) -> Sequence:
    key = SampleKey(0, "p", 0, 0, 0)
    return Sequence("r", key, SamplingParams(1), tokens, len(tokens), Generated(), 0, 0, owner)


def check(blocks: BlockManager, live: list[Sequence]) -> None:
    """What always holds."""
    held = [block for each in live for block in each.blocks]
    assert [held.count(block) for block in range(blocks.num_blocks)] == blocks.references
    assert set(blocks.free) == {b for b in range(blocks.num_blocks) if blocks.references[b] == 0}
    assert {block: prefix for prefix, block in blocks.cached.items()} == blocks.prefix_of
    for parent, _ in blocks.cached:
        assert parent < 0 or parent in blocks.prefix_of
    for each in live:
        assert each.computed <= len(each.blocks) * blocks.block_size < each.computed + blocks.block_size


@given(st.data())
def test_references_free_blocks_and_the_prefix_cache_always_agree(data):
    blocks = BlockManager(num_blocks=12, block_size=2)
    live: list[Sequence] = []
    contents: Contents = {}
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["start", "grow", "fork", "end", "forget"]))
        if action == "start":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
            new = sequence(tokens, data.draw(st.sampled_from(OWNERS)))
            blocks.adopt_prefix(new)
            for i, block in enumerate(new.blocks):
                assert contents[block] == (new.owner, tuple(new.tokens[: 2 * (i + 1)]))  # it holds just these
            if blocks.can_grow(new, len(new.tokens)):
                write(blocks, contents, new, len(new.tokens))
                live.append(new)
            else:
                blocks.release(new)
        elif live:
            chosen = data.draw(st.sampled_from(live))
            if action == "grow" and blocks.can_grow(chosen, chosen.computed + 1):
                chosen.tokens.append(data.draw(st.integers(0, 1)))
                write(blocks, contents, chosen, chosen.computed + 1)
            elif action == "fork" and blocks.free:
                child = sequence(list(chosen.tokens), chosen.owner)
                copy = blocks.fork(chosen, child)
                assert (copy is None) == (chosen.computed % 2 == 0)
                assert chosen.blocks[: chosen.computed // 2] == child.blocks[: chosen.computed // 2]
                live.append(child)
            elif action == "end":
                blocks.release(chosen)
                live.remove(chosen)
            elif action == "forget":
                others = {b for p, b in blocks.cached.items() if contents[b][0] is not chosen.owner}
                blocks.forget(chosen.owner)
                assert set(blocks.cached.values()) == others
        check(blocks, live)


def write(blocks: BlockManager, contents: Contents, each: Sequence, tokens: int) -> None:
    """What a pass does: grow, compute, make full blocks findable."""
    before = each.computed
    blocks.grow(each, tokens)
    each.computed = tokens
    for i in range(before // 2, tokens // 2):
        contents[each.blocks[i]] = (each.owner, tuple(each.tokens[: 2 * (i + 1)]))
    blocks.remember(each, before)


def test_a_block_that_is_needed_again_takes_those_behind_it_out_of_the_cache():
    blocks = BlockManager(num_blocks=3, block_size=2)
    first = sequence([1, 2, 3, 4, 5])
    write(blocks, {}, first, 5)
    assert len(blocks.cached) == 2
    blocks.release(first)
    other = sequence([9, 9, 9, 9])
    write(blocks, {}, other, 4)  # takes the unfindable block, then the deepest findable one
    again = sequence([1, 2, 3, 4, 5])
    blocks.adopt_prefix(again)
    assert again.computed == 2
