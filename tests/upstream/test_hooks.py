"""Parts of a model that are of a subclass, for a block or in a copy."""

import contextlib
import copy

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_sinks.upstream.hooks import copied_as, hooked, subclass


def doubling(kind):
    return subclass(kind, __call__=lambda part, x: 2 * kind.__call__(part, x))


def test_a_subclass_has_the_name_and_its_members_alone():
    kind = subclass(nn.Linear, more=1, kind="any name")
    assert kind.__name__ == "Linear" and kind.__bases__ == (nn.Linear,)
    assert (kind.more, kind.kind, kind.__call__) == (1, "any name", nn.Linear.__call__)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [None, ZeroDivisionError, Stop])
def test_parts_are_of_their_subclass_for_a_block(error):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), mx.ones((1, 3))
    first, last = model.layers
    expected, inside = model(x), 2 * last(2 * first(x))
    kind = doubling(nn.Linear)
    with (
        contextlib.suppress(ZeroDivisionError, Stop),
        hooked((part, kind) for part in model.layers),
    ):
        assert mx.array_equal(model(x), inside)
        if error:
            raise error
    assert [type(part) for part in model.layers] == [nn.Linear] * 2
    assert mx.array_equal(model(x), expected)


def test_a_part_that_cannot_be_hooked_leaves_none_hooked():
    parts = [nn.Linear(3, 3), nn.ReLU()]
    with pytest.raises(TypeError), hooked(zip(parts, (doubling(nn.Linear), int))):
        pass
    assert [type(part) for part in parts] == [nn.Linear, nn.ReLU]


def test_a_copy_is_of_the_subclass_and_shares_the_weights():
    part = nn.Linear(3, 3)
    copied = copied_as(part, doubling(nn.Linear))
    assert type(part) is nn.Linear and type(copied).__base__ is nn.Linear
    assert copied.weight is part.weight
    x = mx.ones((1, 3))
    assert mx.array_equal(copied(x), 2 * part(x))


def test_a_copy_made_in_a_block_stays_as_it_was_made():
    part, kind = nn.Linear(3, 3), doubling(nn.Linear)
    with hooked([(part, kind)]):
        copied = copy.copy(part)
    assert (type(part), type(copied)) == (nn.Linear, kind)
