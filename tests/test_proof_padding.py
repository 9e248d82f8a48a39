"""prove() and packed execution: all that a model makes of padding is compared, or the user is told."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.proof import prove_patched

LENGTHS = torch.tensor([12, 7, 9, 1, 12, 5])
PADDING = torch.arange(12) >= LENGTHS.unsqueeze(1)  # (6, 12), True = ignore
REMEDY = "patch(packed=False)"


def encoder(batch_first=True):
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
    return model


class Reader(nn.Module):
    """An encoder that runs packed, and something that reads what it gives: read(model, hidden, padding)."""

    def __init__(self, read, batch_first=True):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = encoder(batch_first), nn.Linear(16, 3)
        self.conv, self.norm = nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.register_buffer("seen", torch.zeros(16))
        self.read, self.batch_first = read, batch_first

    def forward(self, src, padding):
        src = src if self.batch_first else src.transpose(0, 1)
        hidden = self.encoder(src, src_key_padding_mask=padding)
        return self.read(self, hidden if self.batch_first else hidden.transpose(0, 1), padding)


def inputs(padding=PADDING):
    return {"src": torch.randn(*padding.shape, 16, generator=torch.Generator().manual_seed(1)), "padding": padding}


def first(model, hidden, padding):
    return model.head(hidden[:, 0])


def masked_mean(model, hidden, padding):
    keep = ~padding.unsqueeze(-1)
    return model.head((hidden * keep).sum(1) / keep.sum(1))


def across(hidden, model, mask):
    return model.attention(hidden[:, :2], hidden, hidden, key_padding_mask=mask, need_weights=False)[0]


def gathered(model, hidden, padding):
    model.seen = model.seen + hidden.mean((0, 1)).detach()
    return first(model, hidden, padding)


def straight_through(model, hidden, padding):
    mean = hidden.mean(1)
    return masked_mean(model, hidden, padding) + model.head(mean - mean.detach())


READ = {
    "mean": lambda model, hidden, padding: model.head(hidden.mean(1)),
    "maximum": lambda model, hidden, padding: model.head(hidden.amax(1)),
    "convolution": lambda model, hidden, padding: model.conv(hidden.transpose(1, 2)),
    "convolution, per token": lambda model, hidden, padding: model.conv(hidden.transpose(1, 2)).transpose(1, 2),
    "attention without the mask": lambda model, hidden, padding: across(hidden, model, None),
    "one row": lambda model, hidden, padding: model.head(hidden).flatten(1),
    "as many as were read": lambda model, hidden, padding: (hidden[..., 0] > 0.0).sum(1),
    "statistics alone": gathered,
    "gradient alone": straight_through,
}
NOT_READ = {
    "first token": first,
    "masked mean": masked_mean,
    "each token": lambda model, hidden, padding: {"hidden": hidden, "logits": model.head(hidden)},
    "tokens of the batch in one row": lambda model, hidden, padding: model.head(hidden).flatten(0, 1),
    "length before batch": lambda model, hidden, padding: model.head(hidden).transpose(0, 1),
    "a score for each token": lambda model, hidden, padding: model.head(hidden)[..., 0],
    "attention with the mask": lambda model, hidden, padding: across(hidden, model, padding),
    "convolution of the masked": lambda model, hidden, padding: model.conv(
        hidden.masked_fill(padding.unsqueeze(-1), 0.0).transpose(1, 2)
    ),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_an_output_that_depends_on_padding_fails_with_the_remedy(read, train):
    report = tfk.prove(Reader(read).train(train), inputs())
    assert not report.passed
    assert REMEDY in str(report.worst) and "encoder" in str(report.worst), report.table()
    model = Reader(read).train(train)
    tfk.patch(model, packed=False)
    assert tfk.prove(model, inputs()).passed


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("read", NOT_READ.values(), ids=NOT_READ)
def test_an_output_that_does_not_passes(read, batch_first):
    report = tfk.prove(Reader(read, batch_first), inputs(), steps=1)
    assert report.passed, report.table()
    square = LENGTHS.clamp(max=6)  # as many texts as positions: the axes cannot be told by their sizes
    report = tfk.prove(Reader(read, batch_first), inputs(torch.arange(6) >= square.unsqueeze(1)))
    assert report.passed, report.table()


def test_the_padding_of_each_output_is_told():
    report = tfk.prove(Reader(NOT_READ["each token"]), inputs())
    told = [note for note in report.notes if "26 of 72 positions are padding" in note]
    assert [note.partition(":")[0] for note in told] == ["output.hidden", "output.logits"]
    assert not [note for note in tfk.prove(Reader(first), inputs()).notes if "padding" in note]


def test_one_text_with_padding():
    """The calls that prove() makes up, with padding in front, run padded; that is not told as the model's own way."""
    report = tfk.prove(Reader(first), inputs(PADDING[1:2]))
    assert report.passed and not any("original code" in note for note in report.notes), report.table()


def test_a_little_padding_behind_16_bits_fails():
    """One position of 72 moves the mean by less than bfloat16 rounds; float64 sees it."""
    few = torch.zeros(6, 12, dtype=torch.bool)
    few[3, 11] = True

    def read(model, hidden, padding):
        return model.head(100.0 + hidden.mean((0, 1)))

    report = tfk.prove(Reader(read), inputs(few), dtype=torch.bfloat16)
    assert not report.passed and REMEDY in str(report.worst), report.table()


def test_a_loss_that_reads_padding_fails_with_the_remedy():
    model = Reader(NOT_READ["each token"])
    labels = torch.arange(72) % 3
    ignored = labels.masked_fill(PADDING.flatten(), -100)
    for target, passes in ((labels, False), (ignored, True)):
        loss = lambda output, target=target: F.cross_entropy(output["logits"].flatten(0, 1), target)
        report = tfk.prove(model, inputs(), loss_fn=loss, steps=1)
        assert report.passed == passes, report.table()
    report = tfk.prove(model, inputs(), loss_fn=lambda output: output["logits"].square().mean())
    assert {row.tensor for row in report.failures if REMEDY in str(row)} == {"loss"}


# --- defects at padded positions --------------------------------------------------------------------------------------


class Token(nn.Module):
    """Works token by token; nothing in it can be packed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, src, attention_mask):
        hidden = self.norm(src)
        return hidden, self.head(hidden)


@pytest.mark.parametrize("constant", [0.0, 1e6])
def test_a_constant_at_padded_positions_fails_where_nothing_ran_packed(constant):
    class Constant(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x).masked_fill(PADDING.unsqueeze(-1), constant)

    given = {"src": inputs()["src"], "attention_mask": (~PADDING).long()}
    report = prove_patched(Token(), given, patch=lambda model: setattr(model.norm, "__class__", Constant))
    assert {row.tensor for row in report.failures if row.kind == "output"} >= {"output.0", "output.1"}


def spoiled(change):
    """patch(), and then another class for the stack that packs: change(what it gives) instead of what it gives."""

    def patch(model):
        tfk.patch(model)

        class Spoiled(type(model.encoder)):
            def forward(self, *args, **kwargs):
                return change(super().forward(*args, **kwargs))

        model.encoder.__class__ = Spoiled

    return patch


def lost(hidden):
    """As if one token of a text were padding."""
    return hidden.clone().index_put_((torch.tensor(1), torch.tensor(6)), torch.zeros(()))


@pytest.mark.parametrize(
    "change",
    [lost, lambda h: h.masked_fill(PADDING.unsqueeze(-1), 1.0), lambda h: h + 1e-3 * PADDING.unsqueeze(-1)],
    ids=["a token lost", "ones", "almost 0"],
)
@pytest.mark.parametrize("train", [False, True])
def test_a_packed_stack_gives_0_at_padding_and_nowhere_else(change, train):
    report = prove_patched(Reader(NOT_READ["each token"]).train(train), inputs(), patch=spoiled(change))
    assert {"output.hidden", "output.logits"} <= {row.tensor for row in report.failures}, report.table()


def test_a_head_that_is_wrong_at_padding_alone_fails():
    class Wrong(nn.Linear):
        def forward(self, x):
            return super().forward(x) + (x == 0.0).all(-1, keepdim=True)

    def patch(model):
        tfk.patch(model)
        model.head.__class__ = Wrong

    report = prove_patched(Reader(NOT_READ["each token"]), inputs(), patch=patch)
    assert "output.logits" in {row.tensor for row in report.failures}, report.table()


class Twice(nn.Module):
    """One encoder for two inputs, of which the second alone has padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = encoder()

    def forward(self, src, padding):
        return self.encoder(src), self.encoder(src.flip(1), src_key_padding_mask=padding)


def test_each_call_of_a_stack_has_its_own_padding():
    report = tfk.prove(Twice(), inputs(), steps=1)
    assert report.passed and any("output.1: 26 of 72" in note for note in report.notes), report.table()


def test_a_stack_that_is_checkpointed():
    class Checkpointed(Reader):
        def forward(self, src, padding):
            run = lambda x: self.encoder(x, src_key_padding_mask=padding)
            return first(self, torch.utils.checkpoint.checkpoint(run, src, use_reentrant=False), padding)

    report = tfk.prove(Checkpointed(first).train(), inputs(), steps=1)
    assert report.passed, report.table()


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e20])
def test_a_row_that_one_number_hides(hidden):
    """As Hugging Face's models hide padding; PyTorch's fused attention gives it gradients 12 times too large."""
    torch.manual_seed(0)
    mask = torch.zeros(3, 12)
    mask[2] = hidden
    report = tfk.prove(encoder(), {"src": torch.randn(3, 12, 16), "src_key_padding_mask": mask})
    assert report.passed, report.table()
