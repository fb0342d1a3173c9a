"""PackedExperts: what goes in comes out, from tensors, iterables, files and copies."""

from __future__ import annotations

import copy
import pickle
import weakref

import oracle
import pytest
import torch
from calls import native, pack
from hypothesis import given
from hypothesis import strategies as st
from strategies import SIZES, STRIDES, generator, make_case, strided

from moe_cpu import PackedExperts, pack_ops
from moe_cpu.errors import ArgumentError, DTypeError, MoEError, OutOfMemory

pytestmark = pytest.mark.sanitize
BF16 = torch.bfloat16


def random_bits(*shape, seed=0):
    """Every bf16 pattern, NaN and subnormals too."""
    return torch.randint(-(2**15), 2**15, shape, generator=generator(seed), dtype=torch.int16).view(BF16)


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.int16), b.contiguous().view(torch.int16)
    )


@given(
    E=st.integers(1, 3), K=st.sampled_from(SIZES), I=st.sampled_from(SIZES), activation=st.sampled_from(oracle.ACTIVATIONS),
    how=st.sampled_from((None, *STRIDES)),
)  # fmt: skip
def test_unpack_is_the_inverse(E, K, I, activation, how):
    w1 = random_bits(E, I if activation == "relu2" else 2 * I, K, seed=K * I)
    w2 = random_bits(E, K, I, seed=K + I)
    turn = (lambda t: t) if how is None else (lambda t: strided(t, how))
    packed = PackedExperts.pack(turn(w1), turn(w2), activation=activation)
    assert (packed.E, packed.K, packed.I, packed.N) == (E, K, I, w1.shape[1])
    assert tuple(packed.shape) == tuple(w1.shape)
    back1, back2 = packed.unpack()
    assert same_bits(back1, w1)
    assert same_bits(back2, w2)


@pytest.mark.parametrize("shift", [1, 8])
def test_memory_on_any_boundary_is_packed_and_nothing_beside_it(shift):
    rows, cols = 70, 200
    dense = torch.randn(rows, cols).bfloat16()
    size = pack_ops.packed_elements(rows, cols, "concatenated")
    expected, memory = torch.zeros(size, dtype=torch.bfloat16), torch.full((size + 16,), 7.0).bfloat16()
    pack_ops.pack_expert(dense, "concatenated", expected)
    pack_ops.pack_expert(dense, "concatenated", memory[shift : shift + size])
    assert torch.equal(memory[shift : shift + size], expected)
    assert (memory[:shift] == 7).all()
    assert (memory[shift + size :] == 7).all()
    assert torch.equal(pack_ops.unpack_expert(expected, rows, cols, "concatenated"), dense)


def test_padding_is_zero():
    """Whatever memory the buffer came from, places that hold no weight are zero: their products must vanish."""
    packed = PackedExperts.pack(torch.ones((2, 34, 33), dtype=BF16), torch.ones((2, 33, 17), dtype=BF16))
    assert int(packed.w1.count_nonzero()) == 2 * 34 * 33
    assert int(packed.w2.count_nonzero()) == 2 * 33 * 17
    assert packed.w1.numel() > 2 * 34 * 33


@pytest.mark.parametrize("wrap", [list, iter, lambda t: (m for m in t)])
def test_iterables_pack_the_same(wrap):
    case = make_case(E=3, K=40, I=24, bias=True)
    whole = pack(case)
    parts = PackedExperts.pack(wrap(case.w1), wrap(case.w2), case.w1_bias, case.w2_bias)
    assert same_bits(parts.w1, whole.w1)
    assert same_bits(parts.w2, whole.w2)
    assert native(case, None, parts).equal(native(case, None, whole))


def test_a_generators_matrices_are_let_go_one_by_one():
    """Peak memory is packed plus one dense expert: when a matrix is asked for, the ones before it are gone."""
    given_out: list[weakref.ref] = []
    most_alive = 0

    def matrices(rows, cols):
        nonlocal most_alive
        for e in range(6):
            most_alive = max(most_alive, sum(ref() is not None for ref in given_out))
            matrix = random_bits(rows, cols, seed=e)
            given_out.append(weakref.ref(matrix))
            yield matrix
            del matrix

    PackedExperts.pack(matrices(48, 32), matrices(32, 24))
    assert len(given_out) == 12
    assert most_alive <= 2, "at most the previous pair may still be held"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_converted_only_when_asked(dtype):
    case = make_case(w_dtype=dtype)
    with pytest.raises(DTypeError, match=r"w1.*bfloat16.*dtype=torch\.bfloat16"):
        PackedExperts.pack(case.w1, case.w2)
    back1, back2 = PackedExperts.pack(case.w1, case.w2, dtype=BF16).unpack()
    assert torch.equal(back1, case.w1.to(BF16))
    assert torch.equal(back2, case.w2.to(BF16))


def test_gate_layouts_place_the_same_rows():
    case = make_case(K=40, I=24)
    I = 24
    alternating = torch.stack((case.w1[:, :I], case.w1[:, I:]), dim=2).reshape(case.w1.shape)
    a = PackedExperts.pack(case.w1, case.w2, gate_layout="concatenated")
    b = PackedExperts.pack(alternating, case.w2, gate_layout="interleaved")
    assert same_bits(a.w1, b.w1)
    assert native(case, None, b).equal(native(case, None, a))


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
def test_save_and_load(tmp_path, mmap, activation):
    case = make_case(K=40, I=24, activation=activation, bias=True)
    packed = pack(case)
    packed.save(tmp_path / "experts.pt")
    loaded = PackedExperts.load(tmp_path / "experts.pt", mmap=mmap)
    assert repr(loaded) == repr(packed)
    assert torch.equal(native(case, None, loaded), native(case, None, packed))


@pytest.mark.parametrize(("key", "value"), [("layout_version", 99), ("scheme", "int8")])
def test_a_file_of_another_kind_is_refused(key, value):
    state = pack(make_case()).state_dict() | {key: value}
    with pytest.raises(ArgumentError, match=f"{value}.*pack the dense weights again"):
        PackedExperts.from_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"w1": s["w1"][:, :-1].contiguous()}, "packed w1"),
        (lambda s: {"w2": s["w2"][:2].contiguous()}, r"packed w2.*\[4, "),
        (lambda s: {"w2": s["w2"].float()}, "packed w2.*bf16"),
        (lambda s: {"w1": s["w1"].t()}, "packed w1.*contiguous"),
        (lambda s: {"w1": s["w1"][0]}, "packed w1"),
        (lambda s: {"w1": s["w1"].to("meta")}, "packed w1.*meta"),
        (lambda s: {"w1": None}, "packed w1.*NoneType"),
        (lambda s: {"K": 0}, "K = 0"),
        (lambda s: {"K": s["K"] * 4}, "packed w1"),
        (lambda s: {"gate_layout": "sideways"}, "gate_layout.*sideways"),
        (lambda s: {"w1_bias": torch.zeros(4, 3)}, r"w1_bias.*\[4, 96\]"),
        (lambda s: {"w1_bias": torch.zeros(4, 96, dtype=torch.int32)}, "w1_bias.*int32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    state = pack(make_case()).state_dict()
    with pytest.raises(MoEError, match=message):
        PackedExperts.from_state_dict(state | change(state))


def test_a_missing_entry_is_named():
    state = pack(make_case()).state_dict()
    del state["w2"], state["K"]
    with pytest.raises(ArgumentError, match="w2, K missing"):
        PackedExperts.from_state_dict(state)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_has_weights_of_its_own(copied):
    case = make_case(bias=True, seed=63)
    original = pack(case)
    want = native(case, None, original)
    other = copied(original)
    assert repr(other) == repr(original)
    for mine, theirs in zip(*([p.w1, p.w2, p.w1_bias, p.w2_bias] for p in (original, other)), strict=True):
        assert mine.data_ptr() != theirs.data_ptr()
        mine.zero_()  # what still reads the original's memory would now give zeros
    del original
    assert torch.equal(native(case, None, other), want)


def test_experts_of_unknown_number_outlive_their_source():
    case = make_case(M=6, E=40, K=96, I=64, seed=66)
    packed = PackedExperts.pack(iter(case.w1), iter(case.w2))
    want = native(case, None, pack(case))
    again = [pickle.loads(pickle.dumps(packed)), PackedExperts.from_state_dict(packed.state_dict()), packed]
    del packed
    while again:
        assert torch.equal(native(case, None, again.pop()), want)


def test_weights_without_room_are_an_error_of_their_own(monkeypatch):
    monkeypatch.setattr(pack_ops, "packed_elements", lambda *_: 1 << 60)
    for wrap in (list, iter):
        with pytest.raises(OutOfMemory, match=r"packed w1: \d+ bytes"):
            PackedExperts.pack(wrap(W1), wrap(W2))


def test_a_shallow_copy_shares_them():
    packed = pack(make_case())
    assert copy.copy(packed).w1 is packed.w1


def test_tensors_may_move_to_shared_memory():
    case = make_case(bias=True, seed=64)
    packed = pack(case)
    want = native(case, None, packed)
    for tensor in (packed.w1, packed.w2, packed.w1_bias, packed.w2_bias):
        before = tensor.data_ptr()
        tensor.share_memory_()
        assert tensor.data_ptr() != before
    assert torch.equal(native(case, None, packed), want)


@pytest.mark.parametrize("name", ["w1", "w2", "w1_bias", "w2_bias"])
def test_tensors_cannot_be_replaced(name):
    packed = pack(make_case(bias=True))
    with pytest.raises(AttributeError):
        setattr(packed, name, getattr(packed, name))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_biases_are_copied(dtype):
    case = make_case(bias=True, seed=65)
    case = case.with_(w1_bias=case.w1_bias.to(dtype), w2_bias=case.w2_bias.to(dtype))
    packed = pack(case)
    want = native(case, None, packed)
    case.w1_bias.zero_()
    case.w2_bias.zero_()
    assert torch.equal(native(case, None, packed), want)


W1, W2 = torch.zeros((3, 8, 5), dtype=BF16), torch.zeros((3, 5, 4), dtype=BF16)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((None, None), {}, "w1.*tensor.*NoneType"),
        (("ab", W2), {}, "w1.*tensor.*str"),
        ((W1, [3, 4, 5]), {}, r"w2.*\[rows, columns\] tensor.*int"),
        ((W1[0], W2), {}, r"w1.*\[E, N, K\].*\[8, 5\]"),
        ((W1, W2[0]), {}, r"w2.*\[E, K, I\].*\[5, 4\]"),
        ((W1, W2[:2]), {}, "same number of experts"),
        ((W1.transpose(1, 2), W2), {}, "w1|w2"),
        ((W1, W2.transpose(1, 2)), {}, r"w2.*\[5, 4\].*\[4, 5\]"),
        ((W1[:, :7], W2[..., :3]), {}, "even number of rows.*7"),
        ((W1, W2, torch.zeros(3, 7)), {}, r"w1_bias.*\[3, 8\].*\[3, 7\]"),
        ((W1, W2, None, torch.zeros(3, 6)), {}, r"w2_bias.*\[3, 5\].*\[3, 6\]"),
        ((W1, W2), {"activation": "mish"}, "mish"),
        ((W1, W2), {"gate_layout": "sideways"}, "sideways"),
        ((W1, W2), {"dtype": torch.float16}, "float16"),
        ((W1.int(), W2), {"dtype": BF16}, "w1.*int32"),
        ((W1[:0], W2[:0]), {}, "at least one expert"),
        ((W1[..., :0], W2[:, :0]), {}, "w1.*at least 1"),
        ((W1[:, :0], W2[..., :0]), {}, "w1.*at least 1"),
        (([W1[0], W1[0, :6]], W2[:2]), {}, "w1|w2"),
    ],
)
def test_refusals(arguments, options, message):
    with pytest.raises(MoEError, match=message):
        PackedExperts.pack(*arguments, **options)
