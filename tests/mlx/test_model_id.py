"""Two models that would compute other K/V must not share an id, nor equal ones have two."""

import gc
import hashlib
import json
import struct
import threading
import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from crc32c import crc32c
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from pion_client import identity
from pion_client.mlx import model_id
from pion_grpc.cli.smollm2 import random_llama
from tests.mlx import families, programs


def small(**changes):
    """A llama that is the same in every process, but for what is changed in its arguments."""
    arguments = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 64,
    }
    model = llama.Model(llama.ModelArgs(**arguments | changes))
    key = mx.random.key(7)
    model.update(
        tree_map(lambda p: mx.random.normal(p.shape, dtype=p.dtype, key=key), model.parameters())
    )
    return model


# The same model


def test_a_reloaded_equal_model_has_no_other_id(tmp_path):
    model = small()
    model.save_weights(str(tmp_path / "model.safetensors"))
    again = small()
    again.load_weights(str(tmp_path / "model.safetensors"))
    assert model_id(again) == model_id(model)
    assert model_id(model) == model_id(small())


def test_another_process_has_no_other_id():
    program = (
        "from pion_client.mlx import model_id; from pion_grpc.cli.smollm2 import random_llama;"
        "print(model_id(random_llama(seed=3)))"
    )
    assert programs.run(program).strip() == model_id(random_llama(seed=3))


def test_using_a_model_changes_nothing():
    model = small()
    before = model_id(model)
    mx.eval(model(mx.array([[1, 2, 3]])))
    model.eval()
    model.freeze()
    assert model_id(model) == before


def test_the_format_does_not_drift():
    model = small(num_hidden_layers=1)
    model.set_dtype(mx.bfloat16)
    expected = hashlib.sha256()
    rope = "model.layers.0.self_attn.rope"
    numbers = {f"{rope}.base": 10_000.0, f"{rope}.dims": 32.0, f"{rope}.scale": 1.0}
    numbers[f"{rope}.traditional"] = 0.0
    parameters = sorted([*tree_flatten(model.parameters()), *numbers.items()])
    expected.update(struct.pack("<I", len(parameters)))
    for name, value in parameters:
        expected.update(struct.pack("<I", len(name)) + name.encode())
        if name in numbers:
            number = struct.pack("<d", value)
            expected.update(struct.pack("<I", 0) + struct.pack("<I", 7) + b"float64")
            expected.update(struct.pack("<I", crc32c(number)))
            continue
        expected.update(struct.pack(f"<I{value.ndim}Q", value.ndim, *value.shape))
        expected.update(struct.pack("<I", 8) + b"bfloat16")
        expected.update(struct.pack("<I", crc32c(np.asarray(value.view(mx.uint16)).tobytes())))
    args = json.dumps(vars(model.args), sort_keys=True, separators=(",", ":"))
    expected.update(struct.pack("<I", len(args)) + args.encode())
    assert model_id(model) == "mlx1:" + expected.hexdigest()[:32]


def test_the_id_of_a_known_model_is_still_what_it_was():
    """Written down once: an id that changes with a release makes every stored prefix a miss."""
    layer = nn.Linear(2, 3)
    layer.weight = mx.arange(6, dtype=mx.float32).reshape(3, 2)
    layer.bias = mx.array([-1.0, 0.5, float("inf")])
    assert model_id(layer) == "mlx1:abde805883da4b849d7e6a79e473121f"


def test_no_parameter_is_overlooked():
    model = small(attention_bias=True)
    nn.quantize(model, group_size=64, bits=4)
    seen = {name for name, part in identity._parts(model) if isinstance(part, mx.array)}
    assert seen == {name for name, _ in tree_flatten(model.parameters())}


# Another model


OTHER_ARGUMENTS = [
    {"rope_theta": 500_000.0},
    {"rope_traditional": True},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rms_norm_eps": 1e-6},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32},
]


@pytest.mark.parametrize("other", OTHER_ARGUMENTS, ids=lambda other: next(iter(other)))
def test_other_arguments_with_the_same_weights_never_have_the_same_id(other):
    assert model_id(small(**other)) != model_id(small())


def test_arguments_by_another_name_are_not_overlooked():
    """Some families call them `config`."""
    one, other = (families.build("baichuan_m1", rms_norm_eps=eps) for eps in (1e-5, 1e-6))
    assert not hasattr(one, "args")
    assert model_id(one) != model_id(other)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_same_weights_in_another_type_never_have_the_same_id(dtype):
    model = small()
    before = model_id(model)
    model.set_dtype(dtype)
    assert model_id(model) != before


def test_quantisation_never_keeps_the_id():
    ids = {model_id(small())}
    for bits, group_size in ((4, 64), (4, 32), (8, 64)):
        model = small()
        nn.quantize(model, group_size=group_size, bits=bits)
        ids.add(model_id(model))
    assert len(ids) == 4


def one_weight(model):
    layer = model.model.layers[1].self_attn.v_proj
    layer.weight = mx.where(mx.arange(64) == 5, 0.0, layer.weight)


def one_weight_in_place(model):
    model.model.layers[1].self_attn.v_proj.weight[3, 5] += 1


def in_place_arithmetic(model):
    weight = model.model.norm.weight
    weight *= 2


def loaded_weights(model):
    model.load_weights([("model.norm.weight", mx.zeros(64))], strict=False)


def quantised_where_it_stands(model):
    nn.quantize(model, group_size=64, bits=4)


def another_argument(model):
    model.args.rope_theta = 123.0


def another_rope_base(model):
    model.model.layers[1].self_attn.rope.base = 77.0


@pytest.mark.parametrize(
    "change",
    [
        one_weight,
        one_weight_in_place,
        in_place_arithmetic,
        loaded_weights,
        quantised_where_it_stands,
        another_argument,
        another_rope_base,
    ],
    ids=lambda change: change.__name__,
)
def test_a_model_changed_after_its_id_was_known_never_keeps_it(change):
    model = small()
    before = model_id(model)
    change(model)
    after = model_id(model)
    assert after != before
    assert model_id(model) == after


def test_weights_moved_to_another_name_never_keep_the_id():
    model = small()
    before = model_id(model)
    attention = model.model.layers[0].self_attn
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj
    assert model_id(model) == before  # small() gives both the same weights
    attention.v_proj.weight = attention.v_proj.weight + 1
    swapped = model_id(model)
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj
    assert len({before, swapped, model_id(model)}) == 3


def test_another_shape_of_the_same_bytes_never_keeps_the_id():
    one, other = nn.Linear(2, 8, bias=False), nn.Linear(4, 4, bias=False)
    one.weight = mx.arange(16, dtype=mx.float32).reshape(8, 2)
    other.weight = one.weight.reshape(4, 4)
    assert model_id(one) != model_id(other)


# Adapters

ADAPTER = {"rank": 2, "dropout": 0.0, "scale": 4.0}


def save_adapter(path, *, seed=0, **changes):
    """An adapter as mlx-lm's tuner leaves it: a file of weights and how it is to be applied."""
    model = small()
    linear_to_lora_layers(model, 2, ADAPTER | changes)
    adapters = {k: v for k, v in tree_flatten(model.parameters()) if "lora" in k}
    keys = mx.random.split(mx.random.key(seed), len(adapters))
    path.mkdir(exist_ok=True)
    mx.save_safetensors(
        str(path / "adapters.safetensors"),
        {
            k: mx.random.normal(v.shape, key=x)
            for (k, v), x in zip(adapters.items(), keys, strict=True)
        },
    )
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": ADAPTER | changes}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def test_an_adapter_never_keeps_the_id_of_its_model(tmp_path):
    adapted = load_adapters(small(), save_adapter(tmp_path))
    assert model_id(adapted) != model_id(small())
    assert model_id(adapted) == model_id(load_adapters(small(), save_adapter(tmp_path)))


def test_an_adapter_reloaded_under_the_same_name_never_keeps_the_id(tmp_path):
    model = load_adapters(small(), save_adapter(tmp_path, seed=1))
    before = model_id(model)
    save_adapter(tmp_path, seed=2)
    model.load_weights(str(tmp_path / "adapters.safetensors"), strict=False)
    after = model_id(model)
    assert after != before
    assert after == model_id(load_adapters(small(), str(tmp_path)))


def test_an_adapter_of_another_strength_never_has_the_same_id(tmp_path):
    weak = load_adapters(small(), save_adapter(tmp_path, scale=4.0))
    strong = load_adapters(small(), save_adapter(tmp_path, scale=8.0))
    weights = [dict(tree_flatten(model.parameters())) for model in (weak, strong)]
    assert all(mx.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    before = model_id(weak)
    assert before != model_id(strong)
    for _, module in weak.named_modules():
        if "lora_a" in module:
            module.scale = 8.0
    assert model_id(weak) == model_id(strong)


# How it is computed


def test_values_that_memory_does_not_hold_in_order_are_not_read_in_that_order():
    matrix = mx.arange(12, dtype=mx.float32).reshape(3, 4)
    straight, across = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
    straight.weight = mx.contiguous(matrix.T)
    across.weight = matrix.T
    assert model_id(straight) == model_id(across)
    before = model_id(across)
    across.weight[0, 0] = 99
    assert model_id(across) != before


def test_empty_and_scalar_parameters_do_not_fail():
    layer = nn.Linear(2, 2)
    layer.nothing = mx.zeros((0, 3))
    layer.gate = mx.array(3.0)
    layer.flags = mx.array([True, False])
    before = model_id(layer)
    layer.gate = mx.array(4.0)
    assert model_id(layer) != before


def test_a_replaced_adapter_and_a_model_do_not_stay_in_memory():
    model = small()
    model_id(model)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None
    assert all(known.model() is not None for known in list(identity._known.values()))


def test_arguments_without_json_are_refused_rather_than_guessed():
    model = small()
    model.args.layer_types = object()
    with pytest.raises(TypeError, match="pass model_id"):
        model_id(model)


def test_threads_that_ask_at_once_do_not_get_two_answers():
    model = small()
    mx.eval(model.parameters())
    barrier = threading.Barrier(4)
    answers = []

    def ask():
        barrier.wait()
        answers.append(model_id(model))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert len(set(answers)) == 1
