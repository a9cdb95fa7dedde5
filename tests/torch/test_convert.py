"""`rollpacker convert` as a user meets it: what it writes, what it refuses, how much memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_models import write_model

from rollpacker.cli.main import main
from rollpacker.config import ConfigError
from rollpacker.weights.convert import hf_to_megatron, megatron_to_hf

# Peak resident memory of a conversion above what the process had before it, in bytes.
_MEASURE = """
import sys
from pathlib import Path
import torch
from rollpacker.weights import convert

def rss(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) << 10

direction, source, target = sys.argv[1:]
torch.save([torch.zeros(3)], "/dev/null")
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = rss("VmRSS")
getattr(convert, direction)(source, target, lambda *_: None)
print(rss("VmHWM") - before)
"""


def ignore(*_: object) -> None:
    """No progress shown."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", family="qwen3", tied=True)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_there_and_back(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit-exact, with the other files carried along, progress and no leftovers."""
    assert main(["convert", "hf-to-megatron", str(model), str(tmp_path / "mg")]) == 0
    assert main(["convert", "megatron-to-hf", str(tmp_path / "mg"), str(tmp_path / "hf")]) == 0
    assert "100% of" in capsys.readouterr().out
    assert {"metadata.json", ".metadata", "common.pt", "__0_0.distcp", "__0_2.distcp", "huggingface"} <= names(
        tmp_path / "mg"
    )
    others = {"config.json", "generation_config.json", "tokenizer.json"}
    assert names(tmp_path / "mg" / "huggingface") == others
    assert names(tmp_path) == {"model", "mg", "hf"}
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    assert names(tmp_path / "hf") == others | set(index.values()) | {"model.safetensors.index.json"}
    assert len(set(index.values())) > 1  # about a layer a file
    before = load_file(model / "model.safetensors")
    for name, file in index.items():
        assert torch.equal(load_file(tmp_path / "hf" / file)[name], before.pop(name))
    assert not before


def test_bf16_stays_bf16(model: Path, tmp_path: Path) -> None:
    weights = {k: v.bfloat16() for k, v in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    hf_to_megatron(str(model), str(tmp_path / "mg"), ignore)
    megatron_to_hf(str(tmp_path / "mg"), str(tmp_path / "hf"), ignore)
    back = {k: v for f in (tmp_path / "hf").glob("*.safetensors") for k, v in load_file(f).items()}
    assert all(torch.equal(back[k], weights[k]) and back[k].dtype == torch.bfloat16 for k in weights)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollpacker", "convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_verify_compares_logits(model: Path, tmp_path: Path) -> None:
    done = cli("hf-to-megatron", model, tmp_path / "mg", "--verify")
    assert done.returncode == 0, done.stderr
    difference = float(done.stdout.split("max difference ")[1].split()[0])
    assert 0 < difference < 1e-5  # two programs did compute them
    assert done.stderr == ""


def test_verify_misses_what_differs(tmp_path: Path) -> None:
    """A config that calls itself a Llama but has transformers attend to the last two tokens only."""
    model = write_model(tmp_path / "model", family="llama", tied=False)
    hf_to_megatron(str(model), str(tmp_path / "mg"), ignore)
    carried = tmp_path / "mg" / "huggingface" / "config.json"
    carried.write_text(json.dumps(json.loads(carried.read_text()) | {"model_type": "mistral", "sliding_window": 2}))
    done = cli("megatron-to-hf", tmp_path / "mg", tmp_path / "hf", "--verify")
    assert done.returncode == 1, done.stderr
    assert float(done.stdout.split("max difference ")[1].split()[0]) > 1e-2
    assert "do not compute the same" in done.stderr and "Traceback" not in done.stderr


def test_a_target_that_exists_is_left_alone(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for target in (out, out / "notes.txt"):
        with pytest.raises(ConfigError, match="exists already and is not an empty folder"):
            hf_to_megatron(str(model), str(target), ignore)
    assert names(out) == {"notes.txt"}
    (out / "notes.txt").unlink()
    hf_to_megatron(str(model), str(out), ignore)
    assert "metadata.json" in names(out)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interrupted_conversion_leaves_nothing(
    model: Path, tmp_path: Path, interruption: type[BaseException]
) -> None:
    def interrupt(done_bytes: int, total_bytes: int, name: str) -> None:
        if done_bytes > total_bytes / 2:
            raise interruption

    with pytest.raises(interruption):
        hf_to_megatron(str(model), str(tmp_path / "mg"), interrupt)
    assert names(tmp_path) == {"model"}
    hf_to_megatron(str(model), str(tmp_path / "mg"), ignore)
    with pytest.raises(interruption):
        megatron_to_hf(str(tmp_path / "mg"), str(tmp_path / "hf"), interrupt)
    assert names(tmp_path) == {"model", "mg"}


def test_a_full_disk_comes_with_its_numbers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(2**40, 2**40, 5 << 20)  # a real full disk is not to be had here
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"needs 0\.06 GiB, but .* has 0\.00 GiB free \(0\.06 GiB too few\)"):
        hf_to_megatron(str(model), str(tmp_path / "a" / "mg"), ignore)
    assert names(tmp_path) == {"model"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "there is no tensor 'model.norm.weight', which its config.json implies"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}, "would be lost, the first ones .*q_proj.bias"),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(4)}, "has 1 tensors that its config.json does not imply"),
        ({"model.norm.weight": torch.ones(31)}, "model.norm.weight has 31 rows along axis 0, but .* implies 32"),
        ({"model.layers.0.mlp.up_proj.weight": torch.zeros(48, 32).half()}, "differ in dtype"),
    ],
)
def test_weights_that_do_not_belong_to_the_config(
    model: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    weights = load_file(model / "model.safetensors") | change
    save_file({k: v for k, v in weights.items() if v is not None}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        hf_to_megatron(str(model), str(tmp_path / "mg"), ignore)
    assert names(tmp_path) == {"model"}


def test_weights_that_are_no_loss(model: Path, tmp_path: Path) -> None:
    """A tied head that is stored all the same, and the rotary buffers of old Llama folders."""
    weights = load_file(model / "model.safetensors")
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    save_file(weights | head | buffers, model / "model.safetensors")
    hf_to_megatron(str(model), str(tmp_path / "mg"), ignore)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, "has 2 layers, but config.json says 3"),
        ({"intermediate_size": 50}, r"linear_fc1.weight has 96 rows along axis 0, but config.json implies 100"),
        ({"tie_word_embeddings": False}, "no tensor 'output_layer.weight', which config.json implies"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported"),
    ],
)
def test_a_checkpoint_that_is_another_model(
    model: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    hf_to_megatron(str(model), str(tmp_path / "mg"), ignore)
    carried = tmp_path / "mg" / "huggingface" / "config.json"
    carried.write_text(json.dumps(json.loads(carried.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        megatron_to_hf(str(tmp_path / "mg"), str(tmp_path / "hf"), ignore)
    assert names(tmp_path) == {"model", "mg"}


def test_folders_of_the_wrong_kind(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no huggingface/config\.json in it or beside it"):
        megatron_to_hf(str(model), str(tmp_path / "hf"), ignore)
    (model / "huggingface").mkdir()
    (model / "config.json").rename(model / "huggingface" / "config.json")
    with pytest.raises(ConfigError, match=r"not a Megatron distributed checkpoint, it has no metadata\.json"):
        megatron_to_hf(str(model), str(tmp_path / "hf"), ignore)
    (model / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ConfigError, match="the format zarr is not supported"):
        megatron_to_hf(str(model), str(tmp_path / "hf"), ignore)
    (model / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(ConfigError, match="the checkpoint is incomplete"):
        megatron_to_hf(str(model), str(tmp_path / "hf"), ignore)


def test_an_override_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        main(["convert", "hf-to-megatron", str(model), str(tmp_path / "mg"), "training.lr=1"])
    assert error.value.code == 2


def test_memory_is_about_a_layer(tmp_path: Path) -> None:
    """A model of 0.33 GiB in 24 layers of 12 MiB, embedding 32 MiB: a conversion needs a few of these, not the model."""
    model = write_layers(tmp_path / "model", num_layers=24, hidden=512, ffn=1536, vocab=16384)
    size = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    for direction, source, target in (("hf_to_megatron", "model", "mg"), ("megatron_to_hf", "mg", "hf")):
        command = [sys.executable, "-c", _MEASURE, direction, str(tmp_path / source), str(tmp_path / target)]
        peak = int(subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout)
        assert peak < 0.35 * size, f"{direction}: {peak / 2**20:.0f} of {size / 2**20:.0f} MiB"


def write_layers(folder: Path, *, num_layers: int, hidden: int, ffn: int, vocab: int) -> Path:
    """A Llama folder of random fp32 weights, a file for every eight layers."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 2, hidden)}
    shapes |= {"self_attn.v_proj": (hidden // 2, hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden), "model.norm.weight": torch.ones(hidden)}
    weight_map: dict[str, str] = {}
    for first in range(0, num_layers, 8):
        for layer in range(first, min(first + 8, num_layers)):
            tensors |= {f"model.layers.{layer}.{n}.weight": torch.randn(s) for n, s in shapes.items()}
        save_file(tensors, folder / f"model-{first}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{first}.safetensors")
        tensors = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
