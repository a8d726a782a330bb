"""Packed codes to float16 numbers, in Triton: for kernels that multiply them as they are.

A field of a byte, masked and put in a float16 as it lies there, is the subnormal number code * 2**(shift - 24), which tensor
cores take as it is: one AND unpacks a pair of codes, with no shift and no conversion. Powers of two are folded into scales.
Rows are read as int16 words, two bytes; a word's *halves* are its even and its odd byte.
"""

import triton
import triton.language as tl


@triton.jit
def read(pointers, inside, ALL: tl.constexpr):
    if ALL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0)


def _ptx(bits: int, odd: int) -> str:
    """The fields of two int16 words in one register. At 3 bits a field and its third bit overlap the next field, so the even
    and the odd fields are put together apart; what crosses from a register's one word to the other is masked away."""
    fields, width = (2, 4) if bits == 4 else (4, 2)
    words, third = f"${fields}", f"${fields + 1}"
    lines = ["{ .reg .b32 a, b, c;", f"shr.b32 a, {words}, {8 * odd};"]
    if bits == 3:
        lines += [f"shr.b32 b, {third}, 6;" if odd else f"shl.b32 b, {third}, 2;"]
        # bits of the mask from the words, all others from the third bits
        lines += ["lop3.b32 c, a, b, 0xcc00cc, 0xe4;", "lop3.b32 a, a, b, 0x330033, 0xe4;"]
    for f in range(fields):
        mask = (2**bits - 1) << (width * f)
        lines += [f"and.b32 ${f}, {'c' if bits == 3 and f % 2 else 'a'}, {mask * 65537:#x};"]
    return " ".join([*lines, "}"])


PTX = {(bits, odd): tl.constexpr(_ptx(bits, odd)) for bits in (2, 3, 4) for odd in (0, 1)}
PTX2, PTX2_ODD, PTX3, PTX3_ODD, PTX4, PTX4_ODD = PTX.values()


@triton.jit
def _masked(low, third, f: tl.constexpr, BITS: tl.constexpr):
    if BITS == 4:
        x = low & (15 << (4 * f))
    elif BITS == 2:
        x = low & (3 << (2 * f))
    else:
        x = (low & (3 << (2 * f))) | (third & (4 << (2 * f)))
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def fields(low, third, ODD: tl.constexpr, BITS: tl.constexpr, IN_PTX: tl.constexpr):
    """The fields of the first or second byte of int16 words, a tuple of float16: codes times 2**(width * f - 24).

    third: the third bit of field f at bit 2 * f of each byte.
    IN_PTX: two words at a time in one register; the compiler takes every word by itself.
    """
    if IN_PTX and BITS == 4:
        return tl.inline_asm_elementwise(
            PTX4_ODD if ODD else PTX4, "=r,=r,r", [low], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif IN_PTX and BITS == 2:
        return tl.inline_asm_elementwise(
            PTX2_ODD if ODD else PTX2, "=r,=r,=r,=r,r", [low],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif IN_PTX:
        return tl.inline_asm_elementwise(
            PTX3_ODD if ODD else PTX3, "=r,=r,=r,=r,r,r", [low, third],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        word = low.to(tl.int32) >> (8 * ODD)
        lifted = (third.to(tl.int32) << 2) >> (8 * ODD)
        if BITS == 4:
            return _masked(word, lifted, 0, BITS), _masked(word, lifted, 1, BITS)
        else:
            return (
                _masked(word, lifted, 0, BITS),
                _masked(word, lifted, 1, BITS),
                _masked(word, lifted, 2, BITS),
                _masked(word, lifted, 3, BITS),
            )


@triton.jit
def words(
    codes, j, inside, second, N: tl.constexpr, BITS: tl.constexpr, ALL: tl.constexpr, IN_PTX: tl.constexpr
):  # fmt: skip
    """int16 words `j` of rows at `codes`: of the plane of 2 or 4 bits, and of the third bits as `fields` wants them.

    second: -1 for words of the second half of the plane, whose third bits are the odd ones.
    """
    low = read(codes + j, inside, ALL)
    third = low
    if BITS == 3:
        third = read(codes + (N // 2 + j % (N // 4)), inside, ALL)
        second = tl.broadcast_to(second, third.shape)
        if IN_PTX:
            third = tl.inline_asm_elementwise(
                "{ .reg .b32 a; shr.b32 a, $1, 1; lop3.b32 $0, $1, a, $2, 0xd8; }", "=r,r,r", [third, second],
                dtype=tl.int16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            third = third >> -second
    return low, third


@triton.jit
def half(pairs, odd: tl.constexpr, up, HALVES: tl.constexpr):
    """float16 numbers out of int32 pairs: the odd ones or not, or as `up`, 0 or 8, says for each."""
    if HALVES == 2:
        x = pairs >> (16 * odd)
    else:
        x = pairs >> (2 * up.to(tl.int32))
    return x.to(tl.int16).to(tl.float16, bitcast=True)
