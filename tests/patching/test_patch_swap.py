"""patch() changes classes and nothing else, and everything comes back: copies, pickles, twice, twice back."""

import copy
import importlib
import inspect
import io
import pickle
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import albert, batch, bert, decoder, distilbert, encoder, transformers
from tfm_kernels.patching import swap
from tfm_kernels.proof.modules import replaced


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).eval()


def call(model):
    if hasattr(model, "config"):
        ids, mask = batch()
        return model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    torch.manual_seed(5)
    return model(torch.randn(2, 7, 16))


MODELS = {"sequential": sequential, "encoder": encoder, "bert": bert, "distilbert": distilbert, "albert": albert}


def names_of(model):
    """Everything of a model's modules that is neither tensor nor child."""
    return {
        name: {k: v for k, v in module.__dict__.items() if not k.startswith("_") or k == swap.OPTIONS}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("kind", MODELS)
def test_everything_comes_back(kind):
    model = MODELS[kind]()
    before = call(model)
    classes = [type(module) for module in model.modules()]
    parameters = list(model.named_parameters(remove_duplicate=False))
    modules = list(model.named_modules())
    keys, attributes = list(model.state_dict()), names_of(model)
    report = tfk.patch(model)
    assert report.replaced and [type(module) for module in model.modules()] != classes
    assert [type(module).__name__ for module in model.modules()] == [cls.__name__ for cls in classes]
    assert all(isinstance(module, cls) for module, cls in zip(model.modules(), classes, strict=True))
    for given, wanted in ((list(model.named_parameters(remove_duplicate=False)), parameters),):
        assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(given, wanted, strict=True))
    assert all(a[1] is b[1] for a, b in zip(model.named_modules(), modules, strict=True))
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(call(model), before)
    assert tfk.unpatch(model) > 0
    assert [type(module) for module in model.modules()] == classes
    assert names_of(model) == attributes
    assert torch.equal(call(model), before)
    assert tfk.unpatch(model) == 0


@pytest.mark.parametrize("kind", MODELS)
def test_copies_and_pickles_are_patched_and_stand_alone(kind):
    model = MODELS[kind]()
    stock = call(model)
    with tfk.patch(model) as report:
        wanted = call(model)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(model, 0))]
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        assert report.fallbacks == {}
    for each in copies:
        assert torch.equal(call(each), wanted)
        with torch.no_grad():
            for p in each.parameters():
                p.zero_()
        assert not torch.equal(call(each), wanted) and torch.equal(call(model), stock)
        assert tfk.unpatch(each) > 0
        assert not any(swap.OPTIONS in module.__dict__ for module in each.modules())
        assert [type(m) for m in each.modules()] == [type(m) for m in model.modules()]


def in_another_process(code, path):
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_another_process_can_load_a_patched_model(tmp_path):
    model = bert(num_hidden_layers=1)
    with tfk.patch(model):
        wanted = call(model)
        torch.save([model, *batch(), wanted], tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, ids, mask, wanted = torch.load(sys.argv[1], weights_only=False)\n"
        "out = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]\n"
        "torch.testing.assert_close(out, wanted)\n"
        "import tfm_kernels as tfk\n"
        "assert tfk.unpatch(model) and model.config._attn_implementation == 'sdpa'\n"
    )
    in_another_process(code, tmp_path / "model.pt")


def test_twice():
    model = bert()
    tfk.patch(model, backend="reference")
    with tfk.patch(model, packed=False, backend="aten") as second:
        assert swap.options(model.encoder.layer[0]).backend == "aten"

        assert "encoder" not in {entry.name for entry in second.replaced}
        assert model.config._attn_implementation == "tfm_kernels_aten"
    assert swap.options(model.encoder.layer[0]).backend == "reference"
    assert swap.options(model.encoder).packed and swap.is_fused(model.encoder)
    assert model.config._attn_implementation == "tfm_kernels_reference"
    tfk.unpatch(model)
    assert model.config._attn_implementation == "sdpa"


def test_models_that_share_a_config():
    one = bert()
    two = type(one)(one.config).eval()
    assert one.config is two.config
    stock = call(two)
    tfk.patch(one)
    assert torch.equal(call(two), stock)
    report = tfk.patch(two)
    tfk.unpatch(one)
    assert one.config._attn_implementation == "sdpa"
    torch.testing.assert_close(call(two), stock)
    assert "set to another one" in str(report)
    tfk.unpatch(two)
    assert two.config._attn_implementation == "sdpa" and torch.equal(call(two), stock)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bert", "llama", "mistral", "glm4_moe"])  # the last one's masks are dense
def test_a_model_that_was_not_patched_keeps_its_attention(family, name):
    """Whether it was there before the patch of another one of its config, or is made from it later."""
    one = bert() if family == "bert" else decoder(family, **({"sliding_window": 4} if family == "mistral" else {}))
    one.set_attn_implementation(name)
    two = type(one)(one.config).eval()
    ids, mask = batch()
    told = [{}, {"attention_mask": mask}, {"attention_mask": mask.flip(1)}]
    outputs = lambda model: [model(ids, **kwargs)[0] for kwargs in told]
    before = outputs(two)
    tfk.patch(one)
    three = type(one)(one.config).eval()
    three.load_state_dict(two.state_dict())
    for model in (two, three):
        assert all(map(torch.equal, outputs(model), before)) and tfk.unpatch(model) == 0
    if family != "bert":
        greedy = dict(max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=mask)
        given = two.generate(ids, **greedy)
    assert tfk.unpatch(one) and one.config._attn_implementation == name
    assert all(map(torch.equal, outputs(two), before))
    assert family == "bert" or torch.equal(two.generate(ids, **greedy), given)


def test_a_model_class_is_never_swapped():
    model = bert()
    with tfk.patch(model):
        assert type(model).__mro__[1].__name__ == "BertPreTrainedModel" and not swap.is_fused(model)


def test_a_transformers_that_has_no_models_is_in_nobodys_way(monkeypatch):
    """It imports its parts when they are asked for, and some fail: a torchvision of another torch is enough."""
    broken = types.ModuleType("transformers")
    broken.__getattr__ = lambda name: importlib.import_module(f"no_package_of_{name}")
    monkeypatch.setitem(sys.modules, "transformers", broken)
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    with pytest.raises(ModuleNotFoundError):
        broken.PreTrainedModel  # noqa: B018
    model = tfk.models.CausalLanguageModel(tfk.models.CausalLanguageConfig(17, d_model=16, nhead=2, num_layers=1))
    with tfk.patch(nn.Sequential(model, encoder())) as report:
        assert report.replaced
        assert tfk.generate(model, torch.ones(1, 2, dtype=torch.int64), 3).shape[1] > 2


def test_compiled_models_can_be_patched_and_given_back():
    model = sequential()
    compiled = torch.compile(model, backend="aot_eager")
    stock = call(compiled)
    with tfk.patch(compiled) as report:
        assert report.replaced and swap.is_fused(model)
        torch.testing.assert_close(call(compiled), stock)
    assert torch.equal(call(compiled), stock)


def test_instance_forwards_and_subclasses_are_left():
    model = encoder()
    norm = model.layers[0].norm1
    norm.forward = lambda x: x
    model.layers[1].norm1 = type("MyNorm", (nn.LayerNorm,), {})(16)
    model.layers[1].norm2 = tfk.nn.LayerNorm(16)
    with tfk.patch(model) as report:
        notes = {entry.name: entry.note for entry in report.kept}
        assert notes["layers.0.norm1"] == "because it has a forward of its own"
        assert notes["layers.1.norm1"] == "because no recipe knows MyNorm"
        assert notes["layers.1.norm2"] == "because it is of tfm_kernels.nn already"


def test_sharded_classes_are_rebased():
    """fully_shard gives a module a class derived from the one it has; unpatch takes ours out of it."""

    class Sharded:
        pass

    model = sequential()
    stock = call(model)
    tfk.patch(model)
    fused = type(model)
    model.__class__ = type("FSDPSequential", (Sharded, fused), {})
    report = tfk.patch(model)
    assert "before its class was derived from" in report.entries[0].note
    assert tfk.unpatch(model) and type(model).__bases__ == (Sharded, nn.Sequential)
    assert torch.equal(call(model), stock)


@pytest.mark.parametrize("path", ["encoder.layer.0", "encoder.layer.0.output"])
def test_sharded_layers_of_transformers_run_their_own_code_again(path):
    """transformers wraps the forward of each class derived from one of its layers, as fully_shard's is."""
    model = bert()
    stock = call(model)
    tfk.patch(model)
    layer = model.get_submodule(path)
    layer.__class__ = type("FSDPLayer", (type("FSDPModule", (), {}), type(layer)), {})
    torch.testing.assert_close(call(model), stock)
    tfk.unpatch(model)
    assert inspect.unwrap(type(layer).forward).__module__.startswith("transformers.")
    assert torch.equal(call(model), stock)


def test_a_sharded_attention_still_finds_its_file():
    model = decoder("llama")
    ids = batch()[0]
    stock = model(ids).logits
    tfk.patch(model)
    for layer in model.model.layers:
        kind = type(layer.self_attn)
        layer.self_attn.__class__ = type("FSDPAttention", (type("FSDPModule", (), {}), kind), {"__module__": "torch"})
    torch.testing.assert_close(model(ids).logits, stock)
    tfk.unpatch(model)
    assert torch.equal(model(ids).logits, stock)


def test_layers_that_were_copied_are_given_our_masks_and_theirs_back():
    """A deepcopy of a layer has a config of its own, which its model's setting does not reach."""
    model = decoder("llama")
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[2].self_attn.layer_idx = 2
    ids, mask = batch()
    stock = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    with tfk.patch(model) as report:
        torch.testing.assert_close(model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], stock)
        assert model.model.layers[2].self_attn.config._attn_implementation == "tfm_kernels"
        assert report.fallbacks == {}
    assert model.model.layers[2].self_attn.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], stock)


def test_modules_of_tfm_kernels_stay_what_they_are():
    model = tfk.nn.LayerNorm(16, backend="reference")
    assert not tfk.patch(model).replaced and tfk.unpatch(model) == 0
    assert type(model) is tfk.nn.LayerNorm and model.backend == "reference"


def test_shared_modules_are_patched_once():
    norm = nn.LayerNorm(16)
    model = nn.ModuleList([norm, norm])
    with tfk.patch(model) as report:
        assert [entry.name for entry in report.replaced] == ["0"]
    assert type(norm) is nn.LayerNorm


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((3,), {}, TypeError, "patch: model must be a torch.nn.Module, got int"),
        ((nn.Linear(2, 2),), {"packed": 1}, TypeError, "patch: packed must be True or False, got 1"),
        ((nn.Linear(2, 2),), {"freeze": 1}, TypeError, "patch: freeze must be True or False, got 1"),
        ((nn.Linear(2, 2),), {"freeze": True}, ValueError, "patch: freeze=True needs a model in evaluation mode"),
        ((nn.Linear(2, 2),), {"backend": "gpu"}, ValueError, "patch: backend must be one of reference, aten, cpu"),
    ],
)
def test_bad_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        tfk.patch(*arguments, **options)
    with pytest.raises(TypeError, match="unpatch: model must be a torch.nn.Module, got str"):
        tfk.unpatch("model")


def test_a_backend_that_cannot_says_so():
    model = encoder()
    with tfk.patch(model, backend="triton"), pytest.raises(tfk.BackendError, match="triton"):
        call(model)


def test_report():
    model = nn.ModuleDict({"encoder": encoder(), "head": nn.Linear(16, 2), "odd": nn.Bilinear(2, 2, 2)})
    with tfk.patch(model) as report:
        text = str(report)
    assert len(report.entries) == len(list(model.modules()))
    assert {entry.name for entry in report.replaced} | {entry.name for entry in report.kept} == {
        name for name, _ in model.named_modules()
    }
    assert "encoder.layers.*.norm1" in text and "2x" in text
    assert "head" in text and "the product that suits its rows" in text
    assert "because no recipe knows Bilinear" in text
    assert "note: where a batch has padding" in text
    assert repr(report).startswith("PatchReport(")


def test_a_report_counts_as_replaced_what_a_proof_does():
    """The modules whose code is another; what these run themselves is told apart."""
    model = encoder()
    stock = copy.deepcopy(model)
    with tfk.patch(model) as report:
        inside = {entry.name: entry.inside for entry in report.entries if entry.inside is not None}
        others = [entry.name for entry in report.replaced if entry.name not in inside]
        first = str(report).splitlines()[0]
        assert others == replaced(stock, model) and inside["layers.0.linear1"] == "layers.0"
    every = f"{len(report.replaced)} of {len(report.entries)}"
    assert first == f"{every} modules run fused code: {len(others)} replaced, {len(inside)} inside them"


def test_a_parametrised_module_comes_back_parametrised():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 7, 16)
    stock = model(x, x, x)[0]
    tfk.patch(model)
    nn.utils.parametrizations.weight_norm(model, "in_proj_weight")
    tfk.unpatch(model)
    torch.testing.assert_close(model(x, x, x)[0], stock)
    nn.utils.parametrize.remove_parametrizations(model, "in_proj_weight")
    assert type(model) is nn.MultiheadAttention and isinstance(model.in_proj_weight, nn.Parameter)
    torch.testing.assert_close(model(x, x, x)[0], stock)


def test_another_process_can_give_torchs_classes_back(tmp_path):
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    tfk.patch(model)
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "import tfm_kernels as tfk\n"
        "again = tfk.patch(model)\n"
        "assert {'', 'encoder', 'decoder.layers.0'} <= {entry.name for entry in again.replaced}, str(again)\n"
        "tfk.unpatch(model)\n"
        "assert not [type(m) for m in model.modules() if type(m).__module__.startswith('tfm_kernels')]\n"
    )
    in_another_process(code, tmp_path / "model.pt")


def clip():
    hf = transformers()
    part = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**part, "vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 98}
    vision = {**part, "image_size": 8, "patch_size": 4}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()


@pytest.mark.parametrize("leave", ["unpatch", "context"])
def test_the_attention_of_inner_models_comes_back(leave):
    model = clip()
    parts = (model, model.text_model, model.vision_model)
    model.text_model.set_attn_implementation("eager")
    before = [part.config._attn_implementation for part in parts]
    assert "eager" in before and "sdpa" in before
    with tfk.patch(model):
        assert {part.config._attn_implementation for part in parts} == {"tfm_kernels"}
        if leave == "unpatch":
            tfk.unpatch(model)
            assert [part.config._attn_implementation for part in parts] == before
    assert [part.config._attn_implementation for part in parts] == before


def test_an_inner_models_attention_that_was_chosen_stays():
    from transformers import AttentionInterface

    AttentionInterface.register("somebodys", AttentionInterface._global_mapping["sdpa"])
    model = clip()
    model.text_model.set_attn_implementation("somebodys")
    with tfk.patch(model) as report:
        assert model.text_model.config._attn_implementation == "somebodys"
        assert model.vision_model.config._attn_implementation == "tfm_kernels"
        kept = {entry.name: entry.note for entry in report.kept}
        assert "'somebodys' was chosen on purpose" in kept["text_model"]
    assert model.text_model.config._attn_implementation == "somebodys"
