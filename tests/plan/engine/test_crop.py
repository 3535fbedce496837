"""What was asked for, out of what was made."""

import jax.numpy as jnp
import numpy as np

from shardmap.plan.engine.crop import crop, crops


def test_a_result_is_cropped_where_more_was_made():
    asked = [((2, 4), (0, 3)), ((0, 5),), None, ((7, 9),)]
    made = [((1, 6), (0, 3)), ((0, 5),), ((0, 1),), ((3, 10),)]
    shapes, starts = crops(asked, made)
    assert shapes == ((2, 3), None, None, (2,))
    assert starts == [1, 0, 4]
    x, y = np.arange(15).reshape(5, 3), np.arange(7)
    results = crop([x, "as it is", None, y], shapes, [jnp.int32(s) for s in starts])
    np.testing.assert_array_equal(results[0], x[1:3])
    assert results[1:3] == ["as it is", None]
    np.testing.assert_array_equal(results[3], y[4:6])


def test_crops_at_other_places_are_the_same():
    first, _ = crops([((0, 2),)], [((0, 8),)])
    second, starts = crops([((6, 8),)], [((0, 8),)])
    assert first == second
    assert starts == [6]
