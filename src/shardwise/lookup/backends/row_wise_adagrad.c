/* Row-wise Adagrad of one table in one pass: sums the gradients of a row's bags, adds their mean
   square to the row's state, and changes the row. See Note [Compiled where it runs]. */

#include <math.h>
#include <stdint.h>

/* Partial sums of squares, so that the compiler may use vectors without reordering sums. */
#define LANES 16
/* How many ids ahead rows are fetched: memory answers after that many. */
#define AHEAD 32
/* Floats in a line of the cache. */
#define LINE 16

struct lookups {
    float *weight, *state;
    const int32_t *ids, *bags; /* sorted by id */
    const float *weights;      /* of ids, or NULL */
    const float *grad;         /* of bags */
    int64_t num_ids;
    float lr, eps;
};

static inline __attribute__((always_inline)) void
update(struct lookups x, const int64_t width, float *restrict sum, const int weighted)
{
    float *restrict weight = x.weight;
    const int64_t last = x.num_ids - 1;
    for (int64_t start = 0, at = 0; start <= last; start = at) {
        const int64_t row = x.ids[start];
        for (int64_t i = 0; i < width; i++)
            sum[i] = 0;
        do {
            const int64_t ahead = x.ids[at + AHEAD < last ? at + AHEAD : last];
            for (int64_t i = 0; i < width; i += LINE)
                __builtin_prefetch(weight + ahead * width + i, 1);
            const float *restrict more = x.grad + x.bags[at] * width;
            const float times = weighted ? x.weights[at] : 1;
            for (int64_t i = 0; i < width; i++)
                sum[i] += times * more[i];
            at++;
        } while (at <= last && x.ids[at] == row);
        float squares[LANES] = {0};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES)
            for (int64_t j = 0; j < LANES; j++)
                squares[j] += sum[i + j] * sum[i + j];
        for (; i < width; i++)
            squares[i % LANES] += sum[i] * sum[i];
        for (int64_t j = 0; j < 8; j++)
            squares[j] += squares[j + 8];
        for (int64_t j = 0; j < 4; j++)
            squares[j] += squares[j + 4];
        const float square = (squares[0] + squares[1]) + (squares[2] + squares[3]);
        const float total = x.state[row] + square / width;
        x.state[row] = total;
        const float factor = -x.lr / (sqrtf(total) + x.eps);
        for (i = 0; i < width; i++)
            weight[row * width + i] += factor * sum[i];
    }
}

/* With a width that the compiler knows, the sum stays in registers. */
#define WIDTH(n)                                                                                   \
    case n: {                                                                                      \
        float sum[n];                                                                              \
        if (weights)                                                                               \
            update(x, n, sum, 1);                                                                  \
        else                                                                                       \
            update(x, n, sum, 0);                                                                  \
        break;                                                                                     \
    }

/* `sum` is memory for a row. */
void row_wise_adagrad(float *weight, float *state, const int32_t *ids, const int32_t *bags,
                      const float *weights, const float *grad, float *sum, int64_t num_ids,
                      int64_t width, float lr, float eps)
{
    const struct lookups x = {weight, state, ids, bags, weights, grad, num_ids, lr, eps};
    switch (width) {
        WIDTH(16)
        WIDTH(32)
        WIDTH(64)
        WIDTH(128)
    default:
        update(x, width, sum, weights != 0);
    }
}

/* Sorts the ids of one table by counting them, and says where each was. `ends` is memory for a
   number per row, all zero. */
void sort_by_row(const int32_t *restrict ids, int64_t num_ids, int32_t *restrict ends,
                 int64_t num_rows, int32_t *restrict sorted, int32_t *restrict order)
{
    for (int64_t i = 0; i < num_ids; i++)
        ends[ids[i]]++;
    for (int64_t row = 0, sum = 0; row < num_rows; row++) {
        const int32_t count = ends[row];
        ends[row] = (int32_t)sum;
        sum += count;
    }
    for (int64_t i = 0; i < num_ids; i++) {
        const int32_t at = ends[ids[i]]++;
        sorted[at] = ids[i];
        order[at] = (int32_t)i;
    }
}
