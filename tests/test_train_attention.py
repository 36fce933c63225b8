"""The dense reference against attention written row by row, in float64."""

from __future__ import annotations

import pytest
import torch

from tests.packs import pack_of
from train.attention import Documents, choose, dense


def row_by_row(query, keys, values, batch, active):
    """softmax(q . keys / sqrt(D)) @ values over the list of what a row may see, one row and head at a time."""
    output = torch.empty_like(query)
    group = query.shape[1] // keys[0].shape[1]
    for i, row in enumerate(active):
        start = row - int(batch.positions[row])  # its document's first row
        for head in range(query.shape[1]):
            seen = [keys[0][j, head // group] for j in range(start, row + 1)]
            said = [values[0][j, head // group] for j in range(start, row + 1)]
            seen += [key[i, head // group] for key in keys[1:]]
            said += [value[i, head // group] for value in values[1:]]
            weights = torch.softmax(torch.stack(seen) @ query[i, head] / query.shape[-1] ** 0.5, 0)
            output[i, head] = weights @ torch.stack(said)
    return output


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("first_counted", [0, 3])
def test_dense_equals_row_by_row(group, depth, first_counted):
    """Documents of 5, 1 and 7 tokens; all rows ask, or those from the fourth of each document on."""
    generator = torch.Generator().manual_seed(depth)
    batch = pack_of([([1] * 5, [1] * 5), ([2], [1]), ([3] * 7, [1] * 7)])
    documents = Documents.of(batch, counted=batch.positions >= first_counted)
    active = documents.active.tolist()

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query = random(len(active), 2 * group, 6)
    keys, values = (
        [random(13, 2, 6)] + [random(len(active), 2, 6) for _ in range(depth)] for _ in range(2)
    )
    expected = row_by_row(query, keys, values, batch, active)
    torch.testing.assert_close(dense(query, keys, values, documents), expected)


def test_an_unknown_attention_is_refused():
    with pytest.raises(ValueError, match="flesh"):
        choose("flesh")
