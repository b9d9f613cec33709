// The kernels. Each computes what the NumPy function in transformer/ that it is named after does.
//
// kernels.py compiles this file once for each dtype: `real` is the type of the arrays, `total` the
// type that sums are kept in. Blocks have a power of two of threads, and `shared` has at least one
// number for each of them. Lengths and strides count numbers, not bytes.

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

typedef REAL real;
typedef TOTAL total;
typedef long long integer;

struct Positions {  // of one query in each row of the batch
    integer of[MAX_ROWS];
};

extern __shared__ total shared[];

constexpr integer LANES = 8;
constexpr total LOWEST = -3.4028234663852886e38f;  // the lowest finite float


__device__ total sum_of_block(total mine, total *parts)
{
    __syncthreads();  // all have read what lay in `parts` before
    parts[threadIdx.x] = mine;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    __syncthreads();
    return parts[0];
}


__device__ total largest_of_block(total mine, total *parts)
{
    __syncthreads();  // all have read what lay in `parts` before
    parts[threadIdx.x] = mine;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            parts[threadIdx.x] = fmax(parts[threadIdx.x], parts[threadIdx.x + half]);
    }
    __syncthreads();
    return parts[0];
}


// One block for each vector.
extern "C" __global__ void layer_norm(
    const real *x, const real *scale, const real *shift, real *result, integer width, double eps)
{
    x += blockIdx.x * width;
    result += blockIdx.x * width;
    total sum = 0;
    for (integer i = threadIdx.x; i < width; i += blockDim.x)
        sum += total(x[i]);
    const total mean = sum_of_block(sum, shared) / width;

    total squares = 0;
    for (integer i = threadIdx.x; i < width; i += blockDim.x) {
        const total centered = total(x[i]) - mean;
        squares += centered * centered;
    }
    const total variance = sum_of_block(squares, shared) / width;

    const total deviation = sqrt(variance + total(eps));
    for (integer i = threadIdx.x; i < width; i += blockDim.x)
        result[i] = real((total(x[i]) - mean) / deviation * total(scale[i]) + total(shift[i]));
}


__device__ total gelu(total x)
{
    const total a = -1.5957691216057308;  // -2 √(2/π)
    return x / (1 + exp(x * (a + total(0.044715) * a * x * x)));
}


// One thread for each number, here and in the next three.
extern "C" __global__ void gelu_new(const real *x, real *result, integer size)
{
    const integer i = integer(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size)
        result[i] = real(gelu(total(x[i])));
}


extern "C" __global__ void linear(real *products, const real *bias, integer width, integer size)
{
    const integer i = integer(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size)
        products[i] = real(total(products[i]) + total(bias[i % width]));
}


extern "C" __global__ void linear_gelu(
    real *products, const real *bias, integer width, integer size)
{
    const integer i = integer(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size)
        products[i] = real(gelu(total(products[i]) + total(bias[i % width])));
}


extern "C" __global__ void add_linear(
    const real *residual, real *products, const real *bias, integer width, integer size)
{
    const integer i = integer(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size)
        products[i] = real(total(residual[i]) + (total(products[i]) + total(bias[i % width])));
}


// Write new keys and values into their storage: one thread for each number of the keys.
extern "C" __global__ void append(
    real *keys, real *values, const real *new_keys, const real *new_values,
    Positions lengths, integer capacity, integer heads, integer added, integer head_dim,
    integer row, integer head, integer slot,  // strides of the storage,
    integer new_row, integer new_head, integer new_token,  // and of what is new
    integer size)
{
    const integer n = integer(blockIdx.x) * blockDim.x + threadIdx.x;
    if (n >= size)
        return;
    const integer i = n % head_dim, h = n / head_dim % heads;
    const integer t = n / head_dim / heads % added, b = n / head_dim / heads / added;
    const integer s = lengths.of[b] + t;
    if (s < capacity) {  // padding may reach past the last slot
        const integer from = b * new_row + h * new_head + t * new_token + i;
        const integer to = b * row + h * head + s * slot + i;
        keys[to] = new_keys[from];
        values[to] = new_values[from];
    }
}


// Attention of one query in each row: one block for each head (x) and row (y). A block has at least
// head_dim threads, and a multiple of LANES. `shared` holds the query, a number for each thread, and
// the scores.
extern "C" __global__ void attend(
    const real *queries, const real *keys, const real *values, real *mixed,
    Positions positions, integer window, integer head_dim,
    integer query_row, integer query_head,  // strides of the queries,
    integer mixed_row, integer mixed_head,  // of the result,
    integer row, integer head, integer slot)  // and of the keys, which are those of the values
{
    const integer position = positions.of[blockIdx.y];
    const integer first = max(integer(0), position - window + 1);
    const integer seen = position - first + 1;
    const integer start = blockIdx.y * row + blockIdx.x * head + first * slot;
    queries += blockIdx.y * query_row + blockIdx.x * query_head;
    mixed += blockIdx.y * mixed_row + blockIdx.x * mixed_head;
    keys += start;
    values += start;
    total *const query = shared, *const parts = query + head_dim;
    total *const scores = parts + blockDim.x;

    for (integer i = threadIdx.x; i < head_dim; i += blockDim.x)
        query[i] = total(queries[i]);
    __syncthreads();

    // LANES neighbouring threads share a slot and read neighbouring numbers of its key.
    const integer lane = threadIdx.x % LANES;
    total best = LOWEST;
    for (integer from = 0; from < seen; from += blockDim.x / LANES) {
        const integer s = from + threadIdx.x / LANES;
        total score = 0;
        if (s < seen)
            for (integer i = lane; i < head_dim; i += LANES)
                score += query[i] * total(keys[s * slot + i]);
        parts[threadIdx.x] = score;
        __syncthreads();
        if (lane == 0 && s < seen) {
            for (integer other = 1; other < LANES; other++)
                score += parts[threadIdx.x + other];
            scores[s] = score;
            best = fmax(best, score);
        }
        __syncthreads();  // all have read `parts`
    }
    best = largest_of_block(best, parts);

    total sum = 0;
    for (integer s = threadIdx.x; s < seen; s += blockDim.x) {
        scores[s] = exp(scores[s] - best);
        sum += scores[s];
    }
    sum = sum_of_block(sum, parts);

    // A group of threads reads a value, again as neighbours; the groups go through the slots.
    const integer groups = blockDim.x / head_dim;
    const integer group = threadIdx.x / head_dim, i = threadIdx.x % head_dim;
    total mix = 0;
    if (group < groups)
        for (integer s = group; s < seen; s += groups)
            mix += scores[s] * total(values[s * slot + i]);
    __syncthreads();  // all have read the sum, which lies in `parts`
    parts[threadIdx.x] = mix;
    __syncthreads();
    if (group == 0) {
        for (integer g = 1; g < groups; g++)
            mix += parts[g * head_dim + i];
        mixed[i] = real(mix / sum);
    }
}


// Hide scores from their query, and turn the rest into a pattern, in place. `scores` are
// [batch, heads, rows, slots]: one block for each row (x), head (y) and row of the batch (z).
extern "C" __global__ void softmax(
    total *scores, Positions first, integer last, integer start, integer slots, integer window)
{
    const integer position = min(first.of[blockIdx.z] + integer(blockIdx.x), last);
    scores += ((integer(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * slots;
    total best = LOWEST;
    for (integer s = threadIdx.x; s < slots; s += blockDim.x) {
        const integer distance = position - (start + s);
        if (distance < 0 || distance >= window)
            scores[s] = LOWEST;
        best = fmax(best, scores[s]);
    }
    best = largest_of_block(best, shared);

    total sum = 0;
    for (integer s = threadIdx.x; s < slots; s += blockDim.x) {
        scores[s] = exp(scores[s] - best);
        sum += scores[s];
    }
    sum = sum_of_block(sum, shared);

    for (integer s = threadIdx.x; s < slots; s += blockDim.x)
        scores[s] /= sum;
}
