# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the recurrence of packed rows and of its gradient, over chunks of 64 tokens.

In a chunk of one head, with the sums G of the log-decays since it began and the state S before it, the formulas of
`models/recurrence_interface.py` are products of small matrices:

    D_ij = exp(G_i - G_j) for j <= i                     the decay between two tokens
    A_ij = beta_i (k_i k_j) D_ij for j < i, T = (I + A)^-1
    U = T (beta v), W = T (beta exp(G) k)                 corrections as if the state were zero, and its part in them
    X = U - W S                                           what is added; X = v without a correction
    out = exp(G) q S + ((q k^T) * D) X
    S' = exp(G_last) S + k^T (exp(G_last - G) X)

Chunks depend on each other by S alone: one kernel passes it through the chunks of a piece, one its gradient back; all
others run over all chunks at once. The backward pass keeps only inputs and computes the rest again. Products take the
type of queries and keys (bf16 in a bf16 model) and sum up in fp32; states and G have fp32. Every sum has a fixed order.

The decomposition is that of flash-linear-attention (the WY form of Yang et al., arXiv 2412.06464). Different: T by
forward substitution on the whole chunk, and smaller kernels in the backward pass. Triton 3.4 to 3.7.0 miscompiles
products for Hopper whose left factor is the transpose of a computed tile (flash-linear-attention issues 640 and 984):
no left factor here is one. It is computed the other way round, or read from memory that way (`_load_turned`).
"""

from __future__ import annotations

import triton
import triton.language as tl

# -- tiles -------------------------------------------------------------------------------------------------------------


@triton.jit
def _load(ptr, start, count, stride, first, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows [start, start + count) and columns [first, first + COLUMNS) of those below `width`; zeros elsewhere."""
    row, column = tl.arange(0, ROWS)[:, None], first + tl.arange(0, COLUMNS)[None, :]
    return tl.load(ptr + (start + row) * stride + column, mask=(row < count) & (column < width), other=0.0)


@triton.jit
def _load_turned(ptr, start, count, stride, first, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The transpose of `_load`: [COLUMNS, ROWS]."""
    row, column = tl.arange(0, ROWS)[None, :], first + tl.arange(0, COLUMNS)[:, None]
    return tl.load(ptr + (start + row) * stride + column, mask=(row < count) & (column < width), other=0.0)


@triton.jit
def _store(ptr, tile, start, count, stride, first, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], first + tl.arange(0, COLUMNS)[None, :]
    mask = (row < count) & (column < width)
    tl.store(ptr + (start + row) * stride + column, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _numbers(ptr, start, count, stride, TOKENS: tl.constexpr):
    """One number of each token, in fp32."""
    at = tl.arange(0, TOKENS)
    return tl.load(ptr + (start + at) * stride, mask=at < count, other=0.0).to(tl.float32)


@triton.jit
def _between(total, TOKENS: tl.constexpr):
    """D: the decay from a token (column) to a later one (row)."""
    row, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    return tl.exp(tl.where(row >= column, total[:, None] - total[None, :], float("-inf")))


@triton.jit
def _between_turned(total, TOKENS: tl.constexpr):
    """The transpose of D."""
    row, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    return tl.exp(tl.where(row <= column, total[None, :] - total[:, None], float("-inf")))


# -- forward -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def unit_rows(x_ptr, out_ptr, stride_x, rows, width, eps, scale, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    head = tl.program_id(1)
    start = tl.program_id(0).to(tl.int64) * ROWS
    x = _load(x_ptr + head * width, start, rows - start, stride_x, 0, width, ROWS, WIDTH).to(tl.float32)
    x *= scale / tl.sqrt(tl.sum(x * x, 1) + eps)[:, None]
    _store(out_ptr + head * width, x, start, rows - start, tl.num_programs(1) * width, 0, width, ROWS, WIDTH)


@triton.jit
def corrections(
    table_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, t_ptr, u_ptr, w_ptr, stride_k, stride_v, key_width, value_width,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr, VALUES: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T, by substitution, U and W of a chunk and a head."""
    chunk, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start = tl.load(table_ptr + 2 * chunk).to(tl.int64)
    count = tl.load(table_ptr + 2 * chunk + 1) - start
    keys, values = k_ptr + head // GROUP * key_width, v_ptr + head * value_width
    product = k_ptr.dtype.element_ty
    total = tl.cumsum(_numbers(g_ptr + head, start, count, heads, TOKENS), 0)
    beta = _numbers(beta_ptr + head, start, count, heads, TOKENS)
    scores = tl.zeros([TOKENS, TOKENS], tl.float32)
    for first in range(0, KEYS, BK):
        k = _load(keys, start, count, stride_k, first, key_width, TOKENS, BK)
        scores += tl.dot(k, tl.trans(k), input_precision=PRECISION)
    row, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    # The transpose of A: row i of A is then a column, in the layout in which it is multiplied with the rows of T.
    below = tl.where(row < column, beta[None, :] * scores * _between_turned(total, TOKENS), 0.0)
    solved = tl.where(row == column, 1.0, 0.0)
    for at in range(1, count.to(tl.int32)):
        coefficients = tl.sum(tl.where(column == at, below, 0.0), 1)
        known = tl.sum(coefficients[:, None] * solved, 0)
        solved -= tl.where(row == at, known[None, :], 0.0)
    place = t_ptr + (chunk * heads + head) * TOKENS * TOKENS
    _store(place, solved, 0, TOKENS, TOKENS, 0, TOKENS, TOKENS, TOKENS)
    of_values = (solved * beta[None, :]).to(product)
    for first in range(0, VALUES, BV):
        v = _load(values, start, count, stride_v, first, value_width, TOKENS, BV).to(product)
        u = tl.dot(of_values, v, input_precision=PRECISION)
        _store(u_ptr + head * value_width, u, start, count, heads * value_width, first, value_width, TOKENS, BV)
    of_keys = (solved * (beta * tl.exp(total))[None, :]).to(product)
    for first in range(0, KEYS, BK):
        k = _load(keys, start, count, stride_k, first, key_width, TOKENS, BK)
        w = tl.dot(of_keys, k, input_precision=PRECISION)
        _store(w_ptr + head * key_width, w, start, count, heads * key_width, first, key_width, TOKENS, BK)


@triton.jit
def pass_states(
    members_ptr, facts_ptr, k_ptr, u_ptr, w_ptr, g_ptr, before_ptr, states_ptr, x_ptr, ends_ptr,
    stride_k, stride_u, key_width, value_width,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, BV: tl.constexpr, CORRECTS: tl.constexpr,
    HAS_BEFORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each chunk of a piece, X of its tokens and the state after it: some value columns of a head."""
    first, head, heads = tl.program_id(0) * BV, tl.program_id(1), tl.num_programs(1)
    piece = tl.load(members_ptr + tl.program_id(2)).to(tl.int64)
    facts = facts_ptr + 6 * piece
    begin, end = tl.load(facts).to(tl.int64), tl.load(facts + 1).to(tl.int64)
    first_chunk, follows = tl.load(facts + 2).to(tl.int64), tl.load(facts + 3).to(tl.int64)
    product = k_ptr.dtype.element_ty
    size = key_width * value_width
    rows_before = tl.where(follows >= 0, key_width, 0)
    place = ends_ptr + (tl.maximum(follows, 0) * heads + head) * size
    state = _load(place, 0, rows_before, value_width, first, value_width, KEYS, BV)
    if HAS_BEFORE:
        place = before_ptr + (piece * heads + head) * size
        state += _load(place, 0, key_width - rows_before, value_width, first, value_width, KEYS, BV)
    for number in range(tl.cdiv(end - begin, TOKENS).to(tl.int32)):
        chunk, start = first_chunk + number, begin + number * TOKENS
        count = tl.minimum(end - start, TOKENS)
        held = states_ptr + (chunk * heads + head) * size
        _store(held, state, 0, key_width, value_width, first, value_width, KEYS, BV)
        k = _load_turned(k_ptr + head // GROUP * key_width, start, count, stride_k, 0, key_width, TOKENS, KEYS)
        x = _load(u_ptr + head * value_width, start, count, stride_u, first, value_width, TOKENS, BV).to(tl.float32)
        if CORRECTS:
            w = _load(w_ptr + head * key_width, start, count, heads * key_width, 0, key_width, TOKENS, KEYS)
            x -= tl.dot(w, state.to(product), input_precision=PRECISION)
            _store(x_ptr + head * value_width, x, start, count, heads * value_width, first, value_width, TOKENS, BV)
        log_decay = _numbers(g_ptr + head, start, count, heads, TOKENS)
        whole = tl.sum(log_decay, 0)
        x *= tl.exp(whole - tl.cumsum(log_decay, 0))[:, None]
        added = tl.dot(k, x.to(product), input_precision=PRECISION)
        state = state * tl.exp(whole) + added
    place = ends_ptr + (piece * heads + head) * size
    _store(place, state, 0, key_width, value_width, first, value_width, KEYS, BV)


@triton.jit
def outputs(
    table_ptr, q_ptr, k_ptr, x_ptr, g_ptr, states_ptr, out_ptr, stride_q, stride_k, stride_x, key_width, value_width,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    first, chunk = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64)
    head, heads = tl.program_id(2), tl.num_programs(2)
    start = tl.load(table_ptr + 2 * chunk).to(tl.int64)
    count = tl.load(table_ptr + 2 * chunk + 1) - start
    product = k_ptr.dtype.element_ty
    total = tl.cumsum(_numbers(g_ptr + head, start, count, heads, TOKENS), 0)
    state = states_ptr + (chunk * heads + head) * key_width * value_width
    scores = tl.zeros([TOKENS, TOKENS], tl.float32)
    out = tl.zeros([TOKENS, BV], tl.float32)
    own = head // GROUP * key_width
    for at in range(0, KEYS, BK):
        q = _load(q_ptr + own, start, count, stride_q, at, key_width, TOKENS, BK)
        k = _load(k_ptr + own, start, count, stride_k, at, key_width, TOKENS, BK)
        s = _load(state + at * value_width, 0, key_width - at, value_width, first, value_width, BK, BV)
        scores += tl.dot(q, tl.trans(k), input_precision=PRECISION)
        out += tl.dot(q, s, input_precision=PRECISION)
    out *= tl.exp(total)[:, None]
    scores = (scores * _between(total, TOKENS)).to(product)
    x = _load(x_ptr + head * value_width, start, count, stride_x, first, value_width, TOKENS, BV).to(product)
    out += tl.dot(scores, x, input_precision=PRECISION)
    _store(out_ptr + head * value_width, out, start, count, heads * value_width, first, value_width, TOKENS, BV)


# -- backward ----------------------------------------------------------------------------------------------------------


@triton.jit
def added_gradients(
    table_ptr, q_ptr, k_ptr, g_ptr, grad_ptr, grad_x_ptr, stride_q, stride_k, key_width, value_width,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr, VALUES: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of X by the outputs of its chunk."""
    chunk, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start = tl.load(table_ptr + 2 * chunk).to(tl.int64)
    count = tl.load(table_ptr + 2 * chunk + 1) - start
    product = k_ptr.dtype.element_ty
    total = tl.cumsum(_numbers(g_ptr + head, start, count, heads, TOKENS), 0)
    scores = tl.zeros([TOKENS, TOKENS], tl.float32)
    own = head // GROUP * key_width
    for at in range(0, KEYS, BK):
        q = _load(q_ptr + own, start, count, stride_q, at, key_width, TOKENS, BK)
        k = _load(k_ptr + own, start, count, stride_k, at, key_width, TOKENS, BK)
        scores += tl.dot(k, tl.trans(q), input_precision=PRECISION)
    scores = (scores * _between_turned(total, TOKENS)).to(product)
    place, stride = head * value_width, heads * value_width
    for first in range(0, VALUES, BV):
        grad = _load(grad_ptr + place, start, count, stride, first, value_width, TOKENS, BV).to(product)
        grad_x = tl.dot(scores, grad, input_precision=PRECISION)
        _store(grad_x_ptr + place, grad_x, start, count, stride, first, value_width, TOKENS, BV)


@triton.jit
def pass_gradients(
    members_ptr, facts_ptr, followers_ptr, q_ptr, k_ptr, w_ptr, g_ptr, grad_ptr, grad_ends_ptr, grad_states_ptr,
    grad_before_ptr, grad_x_ptr, stride_q, stride_k, key_width, value_width,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, BV: tl.constexpr, CORRECTS: tl.constexpr,
    HAS_GRAD_ENDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after each chunk of a piece, from the last to the first, of the state before the piece,
    and the rest of that of X."""
    first, head, heads = tl.program_id(0) * BV, tl.program_id(1), tl.num_programs(1)
    piece = tl.load(members_ptr + tl.program_id(2)).to(tl.int64)
    facts = facts_ptr + 6 * piece
    begin, end = tl.load(facts).to(tl.int64), tl.load(facts + 1).to(tl.int64)
    product = k_ptr.dtype.element_ty
    size = key_width * value_width
    grad_state = tl.zeros([KEYS, BV], tl.float32)
    if HAS_GRAD_ENDS:
        place = grad_ends_ptr + (piece * heads + head) * size
        grad_state += _load(place, 0, key_width, value_width, first, value_width, KEYS, BV)
    for at in range(tl.load(facts + 4), tl.load(facts + 5)):
        follower = tl.load(followers_ptr + at).to(tl.int64)
        place = grad_before_ptr + (follower * heads + head) * size
        grad_state += _load(place, 0, key_width, value_width, first, value_width, KEYS, BV)
    num_chunks = tl.cdiv(end - begin, TOKENS).to(tl.int32)
    first_chunk = tl.load(facts + 2).to(tl.int64)
    value_place, stride = head * value_width, heads * value_width
    for number in range(num_chunks):
        chunk = first_chunk + num_chunks - 1 - number
        start = begin + (num_chunks - 1 - number) * TOKENS
        count = tl.minimum(end - start, TOKENS)
        held = grad_states_ptr + (chunk * heads + head) * size
        _store(held, grad_state, 0, key_width, value_width, first, value_width, KEYS, BV)
        log_decay = _numbers(g_ptr + head, start, count, heads, TOKENS)
        total, whole = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        k = _load(k_ptr + head // GROUP * key_width, start, count, stride_k, 0, key_width, TOKENS, KEYS)
        q = _load_turned(q_ptr + head // GROUP * key_width, start, count, stride_q, 0, key_width, TOKENS, KEYS)
        grad = _load(grad_ptr + value_place, start, count, stride, first, value_width, TOKENS, BV).to(tl.float32)
        by_state = tl.dot(k, grad_state.to(product), input_precision=PRECISION)
        grad_x = _load(grad_x_ptr + value_place, start, count, stride, first, value_width, TOKENS, BV).to(tl.float32)
        grad_x += by_state * tl.exp(whole - total)[:, None]
        _store(grad_x_ptr + value_place, grad_x, start, count, stride, first, value_width, TOKENS, BV)
        by_outputs = tl.dot(q, (grad * tl.exp(total)[:, None]).to(product), input_precision=PRECISION)
        grad_state = grad_state * tl.exp(whole) + by_outputs
        if CORRECTS:
            w = _load_turned(w_ptr + head * key_width, start, count, heads * key_width, 0, key_width, TOKENS, KEYS)
            grad_state -= tl.dot(w, grad_x.to(product), input_precision=PRECISION)
    place = grad_before_ptr + (piece * heads + head) * size
    _store(place, grad_state, 0, key_width, value_width, first, value_width, KEYS, BV)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["grad_total_ptr"])
def query_gradients(
    table_ptr, q_ptr, k_ptr, x_ptr, g_ptr, states_ptr, grad_ptr, grad_x_ptr, grad_q_ptr, grad_w_ptr, grad_total_ptr,
    stride_q, stride_k, stride_x, rows, key_width, value_width,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, BK: tl.constexpr, VALUES: tl.constexpr, BV: tl.constexpr,
    CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradients of q and W, and what those of q give to that of G."""
    block, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, heads = tl.program_id(2), tl.num_programs(2)
    at = block * BK
    start = tl.load(table_ptr + 2 * chunk).to(tl.int64)
    count = tl.load(table_ptr + 2 * chunk + 1) - start
    product = k_ptr.dtype.element_ty
    place, stride = head * value_width, heads * value_width
    before = states_ptr + (chunk * heads + head) * key_width * value_width + at * value_width
    grad_scores = tl.zeros([TOKENS, TOKENS], tl.float32)
    grad_q = tl.zeros([TOKENS, BK], tl.float32)
    grad_w = tl.zeros([TOKENS, BK], tl.float32)
    for first in range(0, VALUES, BV):
        grad = _load(grad_ptr + place, start, count, stride, first, value_width, TOKENS, BV).to(product)
        x = _load(x_ptr + place, start, count, stride_x, first, value_width, TOKENS, BV).to(product)
        state = _load(before, 0, key_width - at, value_width, first, value_width, BK, BV)
        grad_scores += tl.dot(grad, tl.trans(x), input_precision=PRECISION)
        grad_q += tl.dot(grad, tl.trans(state), input_precision=PRECISION)
        if CORRECTS:
            grad_x = _load(grad_x_ptr + place, start, count, stride, first, value_width, TOKENS, BV)
            grad_w += tl.dot(grad_x, tl.trans(state), input_precision=PRECISION)
    key_place, key_stride = head * key_width, heads * key_width
    if CORRECTS:
        _store(grad_w_ptr + key_place, -grad_w, start, count, key_stride, at, key_width, TOKENS, BK)
    total = tl.cumsum(_numbers(g_ptr + head, start, count, heads, TOKENS), 0)
    q = _load(q_ptr + head // GROUP * key_width, start, count, stride_q, at, key_width, TOKENS, BK)
    k = _load(k_ptr + head // GROUP * key_width, start, count, stride_k, at, key_width, TOKENS, BK)
    grad_scores = (grad_scores * _between(total, TOKENS)).to(product)
    within = tl.dot(grad_scores, k, input_precision=PRECISION)
    grad_q = grad_q * tl.exp(total)[:, None] + within
    _store(grad_q_ptr + key_place, grad_q, start, count, key_stride, at, key_width, TOKENS, BK)
    token = tl.arange(0, TOKENS)
    place = grad_total_ptr + (block * rows + start + token) * heads + head
    tl.store(place, tl.sum(grad_q * q.to(tl.float32), 1), mask=token < count)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["grad_total_ptr"])
def key_gradients(
    table_ptr, q_ptr, k_ptr, x_ptr, g_ptr, states_ptr, grad_ptr, grad_states_ptr, grad_k_ptr, grad_total_ptr,
    stride_q, stride_k, stride_x, rows, key_width, value_width,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, BK: tl.constexpr, VALUES: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradient of k, without its part in T and W, and what these and S give to that of G."""
    block, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, heads = tl.program_id(2), tl.num_programs(2)
    at = block * BK
    start = tl.load(table_ptr + 2 * chunk).to(tl.int64)
    count = tl.load(table_ptr + 2 * chunk + 1) - start
    product = k_ptr.dtype.element_ty
    place, stride = head * value_width, heads * value_width
    before = (chunk * heads + head) * key_width * value_width + at * value_width
    grad_scores = tl.zeros([TOKENS, TOKENS], tl.float32)  # turned: a row is a key
    into_state = tl.zeros([TOKENS, BK], tl.float32)
    of_state = tl.zeros([BK], tl.float32)
    for first in range(0, VALUES, BV):
        grad = _load(grad_ptr + place, start, count, stride, first, value_width, TOKENS, BV).to(product)
        x = _load(x_ptr + place, start, count, stride_x, first, value_width, TOKENS, BV).to(product)
        state = _load(states_ptr + before, 0, key_width - at, value_width, first, value_width, BK, BV)
        grad_state = _load(grad_states_ptr + before, 0, key_width - at, value_width, first, value_width, BK, BV)
        of_state += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
        grad_scores += tl.dot(x, tl.trans(grad), input_precision=PRECISION)
        into_state += tl.dot(x, tl.trans(grad_state), input_precision=PRECISION)
    log_decay = _numbers(g_ptr + head, start, count, heads, TOKENS)
    total, whole = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
    q = _load(q_ptr + head // GROUP * key_width, start, count, stride_q, at, key_width, TOKENS, BK)
    k = _load(k_ptr + head // GROUP * key_width, start, count, stride_k, at, key_width, TOKENS, BK).to(tl.float32)
    grad_scores = (grad_scores * _between_turned(total, TOKENS)).to(product)
    within = tl.dot(grad_scores, q, input_precision=PRECISION)
    into_state *= tl.exp(whole - total)[:, None]
    key_place, key_stride = head * key_width, heads * key_width
    _store(grad_k_ptr + key_place, into_state + within, start, count, key_stride, at, key_width, TOKENS, BK)
    # G of a token enters by its query with one sign and by its key with the other, that of the last one by S as well.
    by_state = tl.sum(into_state * k, 1)
    of_last = tl.sum(of_state, 0) * tl.exp(whole) + tl.sum(by_state, 0)
    token = tl.arange(0, TOKENS)
    grad_total = tl.where(token == count - 1, of_last, 0.0) - by_state - tl.sum(within * k, 1)
    place = grad_total_ptr + (block * rows + start + token) * heads + head
    tl.store(place, grad_total, mask=token < count)


@triton.jit
def system_gradients(
    table_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, t_ptr, grad_x_ptr, grad_w_ptr, grad_a_ptr, grad_v_ptr, grad_beta_ptr,
    stride_k, stride_v, key_width, value_width,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr, VALUES: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradients of U (that of X) and W: those of v and of A times D, and what v gives to that of beta."""
    chunk, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start = tl.load(table_ptr + 2 * chunk).to(tl.int64)
    count = tl.load(table_ptr + 2 * chunk + 1) - start
    product = k_ptr.dtype.element_ty
    total = tl.cumsum(_numbers(g_ptr + head, start, count, heads, TOKENS), 0)
    beta = _numbers(beta_ptr + head, start, count, heads, TOKENS)
    of_w = beta * tl.exp(total)
    value_place, value_stride = head * value_width, heads * value_width
    of_chunk = (chunk * heads + head) * TOKENS * TOKENS
    turned = _load_turned(t_ptr + of_chunk, 0, TOKENS, TOKENS, 0, TOKENS, TOKENS, TOKENS)
    grad_t = tl.zeros([TOKENS, TOKENS], tl.float32)
    grad_beta = tl.zeros([TOKENS], tl.float32)
    for first in range(0, VALUES, BV):
        v = _load(v_ptr + value_place, start, count, stride_v, first, value_width, TOKENS, BV)
        grad_u = _load(grad_x_ptr + value_place, start, count, value_stride, first, value_width, TOKENS, BV)
        grad_t += tl.dot(grad_u, tl.trans(v.to(product)), input_precision=PRECISION) * beta[None, :]
        grad_v = tl.dot(turned, grad_u, input_precision=PRECISION)
        grad_beta += tl.sum(grad_v * v.to(tl.float32), 1)
        grad_v = grad_v * beta[:, None]
        _store(grad_v_ptr + value_place, grad_v, start, count, value_stride, first, value_width, TOKENS, BV)
    for at in range(0, KEYS, BK):
        k = _load(k_ptr + head // GROUP * key_width, start, count, stride_k, at, key_width, TOKENS, BK)
        grad_w = _load(grad_w_ptr + head * key_width, start, count, heads * key_width, at, key_width, TOKENS, BK)
        grad_t += tl.dot(grad_w, tl.trans(k), input_precision=PRECISION) * of_w[None, :]
    # T = (I + A)^-1, so the gradient of A is -T^T (that of T) T^T, below the diagonal.
    inner = tl.dot(grad_t.to(product), turned, input_precision=PRECISION)
    grad_a = tl.dot(turned, inner.to(product), input_precision=PRECISION)
    row, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    grad_a = tl.where(row > column, -grad_a * _between(total, TOKENS), 0.0)
    _store(grad_a_ptr + of_chunk, grad_a, 0, TOKENS, TOKENS, 0, TOKENS, TOKENS, TOKENS)
    token = tl.arange(0, TOKENS)
    tl.store(grad_beta_ptr + (start + token) * heads + head, grad_beta, mask=token < count)


@triton.jit(do_not_specialize_on_alignment=["grad_total_ptr"])
def system_key_gradients(
    table_ptr, k_ptr, g_ptr, beta_ptr, t_ptr, grad_w_ptr, grad_a_ptr, grad_k_ptr, grad_beta_ptr, grad_total_ptr,
    stride_k, key_width,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What A and W give to the gradients of k, beta and G."""
    chunk, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start = tl.load(table_ptr + 2 * chunk).to(tl.int64)
    count = tl.load(table_ptr + 2 * chunk + 1) - start
    since = tl.exp(tl.cumsum(_numbers(g_ptr + head, start, count, heads, TOKENS), 0))
    beta = _numbers(beta_ptr + head, start, count, heads, TOKENS)
    grad_beta = _numbers(grad_beta_ptr + head, start, count, heads, TOKENS)
    grad_total = tl.zeros([TOKENS], tl.float32)
    key_place, key_stride = head * key_width, heads * key_width
    of_chunk = (chunk * heads + head) * TOKENS * TOKENS
    t_turned = _load_turned(t_ptr + of_chunk, 0, TOKENS, TOKENS, 0, TOKENS, TOKENS, TOKENS)
    grad_a = _load(grad_a_ptr + of_chunk, 0, TOKENS, TOKENS, 0, TOKENS, TOKENS, TOKENS)
    a_turned = _load_turned(grad_a_ptr + of_chunk, 0, TOKENS, TOKENS, 0, TOKENS, TOKENS, TOKENS)
    for at in range(0, KEYS, BK):
        k = _load(k_ptr + head // GROUP * key_width, start, count, stride_k, at, key_width, TOKENS, BK)
        grad_w = _load(grad_w_ptr + key_place, start, count, key_stride, at, key_width, TOKENS, BK)
        wide = k.to(tl.float32)
        scaled = (wide * beta[:, None]).to(k.dtype)
        of_rows = tl.dot(t_turned, grad_w, input_precision=PRECISION) * since[:, None]
        of_rows += tl.dot(grad_a, k, input_precision=PRECISION)
        of_columns = tl.dot(a_turned, scaled, input_precision=PRECISION)
        by_rows = tl.sum(of_rows * wide, 1)
        grad_beta += by_rows
        grad_total += beta * by_rows - tl.sum(of_columns * wide, 1)
        grad_k = _load(grad_k_ptr + key_place, start, count, key_stride, at, key_width, TOKENS, BK)
        grad_k += of_rows * beta[:, None] + of_columns
        _store(grad_k_ptr + key_place, grad_k, start, count, key_stride, at, key_width, TOKENS, BK)
    token = tl.arange(0, TOKENS)
    tl.store(grad_beta_ptr + (start + token) * heads + head, grad_beta, mask=token < count)
    tl.store(grad_total_ptr + (start + token) * heads + head, grad_total, mask=token < count)


@triton.jit(do_not_specialize=["rows"])
def decay_gradients(table_ptr, grad_total_ptr, grad_g_ptr, rows, PARTS: tl.constexpr, TOKENS: tl.constexpr):
    """A log-decay is part of the G of its token and of all later ones of the chunk."""
    chunk, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start = tl.load(table_ptr + 2 * chunk).to(tl.int64)
    count = tl.load(table_ptr + 2 * chunk + 1) - start
    grad = tl.zeros([TOKENS], tl.float32)
    for part in tl.static_range(PARTS):
        grad += _numbers(grad_total_ptr + part * rows * heads + head, start, count, heads, TOKENS)
    row, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    grad = tl.sum(tl.where(column >= row, grad[None, :], 0.0), 1)
    token = tl.arange(0, TOKENS)
    tl.store(grad_g_ptr + (start + token) * heads + head, grad, mask=token < count)


@triton.jit(do_not_specialize=["rows"])
def fold_heads(
    grad_ptr, x_ptr, out_ptr, stride_x, rows, width, eps, scale,
    GROUP: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum over the heads that share a query or a key, and back through its norm."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    start = tl.program_id(0).to(tl.int64) * ROWS
    count = rows - start
    grad = tl.zeros([ROWS, WIDTH], tl.float32)
    for number in tl.static_range(GROUP):
        place = grad_ptr + (head * GROUP + number) * width
        grad += _load(place, start, count, heads * GROUP * width, 0, width, ROWS, WIDTH)
    if UNIT:
        x = _load(x_ptr + head * width, start, count, stride_x, 0, width, ROWS, WIDTH).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) + eps)
        x *= factor[:, None]
        grad = (grad - x * tl.sum(x * grad, 1)[:, None]) * (factor * scale)[:, None]
    _store(out_ptr + head * width, grad, start, count, heads * width, 0, width, ROWS, WIDTH)
