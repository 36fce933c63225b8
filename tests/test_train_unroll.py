"""The golden rules of docs/design.md, "Alignment", enumerated by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.test_train_attention import row_by_row
from tests.packs import DRAFT_VOCAB, HIDDEN, pack_of, small_drafter, small_target
from train.attention import Documents, dense
from train.loss import PLAIN
from train.target import Target
from train.unroll import TrainingTimeTest, counted_rows, teacher_of, unroll

# x_0 .. x_7: a user's turn, an answer of three tokens, a user's token, an answer of one token
CONVERSATION = ([10, 11, 12, 13, 14, 15, 16, 17], [0, 0, 0, 1, 1, 1, 0, 1])
SECOND = ([20, 21, 22, 23], [0, 1, 1, 1])


def documents_of(batch, *, bucket=1):
    return Documents.of(batch, counted=counted_rows(batch, depths=1)[0], bucket=bucket)


def loss_of(model, batch, counts):
    counted = counted_rows(batch, depths=model.depths)
    return model(batch, Documents.of(batch, counted=counted[0]), counted, torch.as_tensor(counts))


class Spy(torch.nn.Module):
    """Stands where the drafter stands and writes down what every row reads.

    Its feature holds a number per row: the row's first aux value at depth 0, and 1000 more at each depth.
    """

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(1, 1, bias=False).double()
        self.target_ids = torch.arange(DRAFT_VOCAB) * 2
        self.lm_head = lambda normed: torch.zeros(normed.shape[0], DRAFT_VOCAB)
        self.seen = []

    def matrices(self, dtype, *, float8):
        return None

    def project(self, aux, matrices):
        return aux[:, :1]

    def read_tokens(self, embedding, matrices):
        return embedding

    def forward(self, embedding, feature, *, positions, attention, matrices, active):
        self.seen.append((embedding[:, 0].tolist(), feature[:, 0].tolist(), positions.tolist()))
        feature = feature if active is None else feature[active]
        return feature, feature + 1000, None, None


def test_every_row_and_depth_reads_what_the_table_says():
    batch = pack_of([CONVERSATION, SECOND])
    # the embedding of token t is t itself, so that the spy can read the token
    embedding = torch.arange(64, dtype=torch.float64)[:, None].expand(64, HIDDEN)
    target = Target(embedding=embedding, final_norm=torch.ones(HIDDEN), head=embedding, config={})
    spy = Spy()
    unroll(spy, target, batch, documents_of(batch), depths=3, attention=dense, dtype=torch.float64)
    aux = batch.aux[:, 0].tolist()
    # the rows that ask, and go on to depth 1: from each document's first counted row to its end
    assert documents_of(batch).active.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    # row:            0   1   2   3   4   5   6   7 |  0   1   2   3        (rows of the two documents)
    tokens_read = [
        [11, 12, 13, 14, 15, 16, 17, None, 21, 22, 23, None],  # depth 0: x_{p+1}
        [12, 13, 14, 15, 16, 17, None, None, 22, 23, None, None],  # depth 1: x_{p+2}
        [13, 14, 15, 16, 17, None, None, None, 23, None, None, None],  # depth 2: x_{p+3}
    ]
    rotary_positions = [
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3],
        [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4],
        [2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5],
    ]
    for depth, (tokens, features, positions) in enumerate(spy.seen):
        rows = range(12) if depth == 0 else range(1, 12)
        for row, token in zip(rows, tokens, strict=True):
            expected = tokens_read[depth][row]
            if expected is not None:  # None: x_{p+1+k} does not exist, and nothing counts the row
                assert token == expected, (depth, row)
        assert features == pytest.approx([aux[row] + 1000 * depth for row in rows]), "fc(aux_p), then its own output"
        assert positions == [rotary_positions[depth][row] for row in rows]


def test_the_layer_is_what_the_server_computes():
    """sglang/srt/models/llama_eagle3.py written out for one document, two depths, in float64, from the checkpoint's names."""
    target, batch, depths = small_target(), pack_of([CONVERSATION]), 2
    drafter = small_drafter(target)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    w = {name: p.detach() for name, p in drafter.named_parameters()}

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]

    def turn(x, positions):  # rotary, neox style: the halves of a head
        angles = positions[:, None].double() / 10000 ** (torch.arange(0, 8, 2).double() / 8)
        cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    feature, keys, values, outputs = batch.aux @ w["fc.weight"].T, [], [], []
    for depth in range(depths):
        token = target.embedding[batch.tokens.roll(-1 - depth)]
        x = torch.cat([norm(token, "midlayer.input_layernorm"), norm(feature, "midlayer.hidden_norm")], -1)
        heads = {n: (x @ w[f"midlayer.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, 8)) for n in "qkv"}
        positions = batch.positions + depth
        query, key = turn(heads["q"], positions), turn(heads["k"], positions)
        keys.append(key)
        values.append(heads["v"])
        attended = row_by_row(query, keys, values, batch, range(8)).flatten(-2)
        residual = feature + attended @ w["midlayer.self_attn.o_proj.weight"].T
        y = norm(residual, "midlayer.post_attention_layernorm")
        gate, up = (y @ w[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        feature = residual + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
        outputs.append(norm(feature, "norm"))
    every_row = documents_of(batch, bucket=8)
    found = unroll(drafter, target, batch, every_row, depths=depths, attention=dense, dtype=torch.float64)
    # the last rows read tokens that do not exist, and nothing counts them
    torch.testing.assert_close(found[:, :6], torch.stack(outputs)[:, :6])


def test_a_row_counts_when_all_it_predicts_is_the_assistants_and_exists():
    batch = pack_of([CONVERSATION, SECOND])
    counted = [rows.long().tolist() for rows in counted_rows(batch, depths=4)]
    # row:       0  1  2  3  4  5  6  7   0  1  2  3
    assert counted == [
        [0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0],  # x_{p+2}
        [0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0],  # x_{p+2} and x_{p+3}
        [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # x_{p+2} .. x_{p+4}
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_the_teacher_of_row_p_at_depth_k_is_the_target_at_p_plus_1_plus_k():
    """A head that is the identity lets the teacher's own logits say which row they come from."""
    batch = pack_of([CONVERSATION, SECOND])
    last = torch.arange(12.0)[:, None] * torch.eye(1, HIDDEN)  # row p holds p in its first place
    target = Target(embedding=torch.eye(HIDDEN), final_norm=torch.ones(HIDDEN), head=torch.eye(HIDDEN), config={})
    documents = documents_of(batch)
    teacher, seen = teacher_of(
        target, replace(batch, last=last), documents, target_ids=torch.tensor([0, 1]), depths=3, make=PLAIN.teacher
    )
    counted = counted_rows(batch, depths=3)
    for depth in range(3):
        for place, row in enumerate(documents.active.tolist()):
            if counted[depth, row]:
                assert teacher.logits[seen[depth, place], 0] == row + 1 + depth


def test_a_row_sees_its_past_at_depth_0_and_its_own_drafts_and_nothing_else():
    """Equal scores everywhere: the output is the mean of the visible values, each a place of its own."""
    batch = pack_of([CONVERSATION, SECOND])
    rows, depths = batch.num_tokens, 3
    documents = documents_of(batch)
    active = documents.active.tolist()
    places = torch.eye(rows * depths).reshape(depths, rows, 1, rows * depths)  # value of (depth, row)
    values = [places[0], places[1][active], places[2][active]]
    keys = [torch.zeros_like(value) for value in values]
    query = torch.zeros_like(keys[1])
    seen = dense(query, keys, values, documents)[:, 0].reshape(len(active), depths, rows) > 0
    for i, row in enumerate(active):
        first = 0 if row < 8 else 8
        expected = {(0, past) for past in range(first, row + 1)} | {(1, row), (2, row)}
        assert {tuple(x) for x in seen[i].nonzero().tolist()} == expected


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}])
def test_packed_equals_unpacked(flags):
    """Loss and every gradient of five conversations, in one pack or one by one, in float64."""
    generator = torch.Generator().manual_seed(5)
    documents = []
    for length in (9, 1, 14, 5, 2):
        tokens = torch.randint(0, 64, (length,), generator=generator).tolist()
        documents.append((tokens, (torch.rand(length, generator=generator) < 0.7).long().tolist()))
    packed = pack_of(documents)
    counts = counted_rows(packed, depths=4).sum(1).double()
    results = []
    for packs in ([packed], [pack_of([document]) for document in documents]):
        target = small_target()
        model = TrainingTimeTest(small_drafter(target, **flags), target, depths=4, gamma=0.8, attention=dense, head=PLAIN, dtype=torch.float64)
        loss = sum(loss_of(model, batch, counts)[0] for batch in packs)
        loss.backward()
        results.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    (loss, gradients), (loss_alone, gradients_alone) = results
    assert loss == pytest.approx(loss_alone, rel=1e-9)
    for name, gradient in gradients.items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(gradient, gradients_alone[name], rtol=1e-6, atol=1e-9, msg=name)


def test_metrics_count_a_chain_only_as_far_as_it_is_right():
    """acc_1 has in its denominator the rows that depth 0 got right, not all of them."""
    target = small_target()
    batch = pack_of([(list(range(20)), [1] * 20)])
    model = TrainingTimeTest(small_drafter(target), target, depths=3, gamma=0.8, attention=dense, head=PLAIN, dtype=torch.float64)
    _, sums = loss_of(model, batch, [18.0, 17.0, 16.0])
    counted, _, _, reached, hits, _ = sums.values.tolist()
    assert counted == [18, 17, 16]
    assert reached[0] == 18
    assert reached[1] <= hits[0] and reached[2] <= hits[1]


def test_padding_changes_nothing():
    """A padding document of garbage, which nothing supervises."""
    target, documents = small_target(), [CONVERSATION, SECOND]
    padded = pack_of([*documents, ([0] * 6, [0] * 6)])
    counts = torch.tensor([5.0, 3.0])
    model = TrainingTimeTest(small_drafter(target), target, depths=2, gamma=0.8, attention=dense, head=PLAIN, dtype=torch.float64)
    losses = [loss_of(model, batch, counts)[0].item() for batch in (pack_of(documents), padded)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_pack_that_nothing_counts_still_has_gradients_of_zero():
    """A rank with an empty pack must take part in the reduction, not hang it."""
    target = small_target()
    drafter = small_drafter(target)
    model = TrainingTimeTest(drafter, target, depths=2, gamma=0.8, attention=dense, head=PLAIN, dtype=torch.float64)
    loss, _ = loss_of(model, pack_of([([1, 2, 3], [0, 0, 0])]), [5.0, 5.0])
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in drafter.parameters())


@pytest.mark.parametrize("bucket, rows", [(1, 11), (4, 12), (64, 12)])
def test_active_rows_fill_a_bucket_with_rows_of_the_pack(bucket, rows):
    """Eleven rows ask; a bucket of 4 takes row 0 as well; no bucket asks for more rows than there are."""
    batch = pack_of([CONVERSATION, SECOND])
    documents = documents_of(batch, bucket=bucket)
    assert documents.active.tolist() == list(range(12 - rows, 12))
    assert documents.cu_query.tolist() == [0, rows - 4, rows]


def test_rows_that_ask_without_counting_change_nothing():
    """The same loss and gradients when every row asks as when only those from the first counted one on do."""
    batch, target = pack_of([CONVERSATION, SECOND]), small_target()
    results = []
    for bucket in (1, 64):
        model = TrainingTimeTest(small_drafter(target), target, depths=3, gamma=0.8, attention=dense, head=PLAIN, dtype=torch.float64)
        counted = counted_rows(batch, depths=3)
        documents = documents_of(batch, bucket=bucket)
        loss, _ = model(batch, documents, counted, counted.sum(1))
        loss.backward()
        results.append([loss] + [p.grad for p in model.parameters()])
    for few, all_rows in zip(*results, strict=True):
        torch.testing.assert_close(few, all_rows, rtol=1e-9, atol=1e-12)
