/* Row-wise Adagrad of one table in one pass: sums the gradients of a row's bags, adds their mean
   square to the row's state, and changes the row. See Note [Compiled where it runs]. */

#include <math.h>
#include <stdint.h>

/* Partial sums of squares, so that the compiler may use vectors without reordering sums. */
#define LANES 16
/* How many ids ahead the row of an id, its state and its bag's gradient are fetched: memory answers
   after that many, and no access of theirs can be foreseen. */
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
            const int64_t ahead = at + AHEAD < last ? at + AHEAD : last;
            const int64_t row_ahead = x.ids[ahead], bag_ahead = x.bags[ahead];
            __builtin_prefetch(x.state + row_ahead, 1);
            for (int64_t i = 0; i < width; i += LINE) {
                __builtin_prefetch(weight + row_ahead * width + i, 1);
                __builtin_prefetch(x.grad + bag_ahead * width + i);
            }
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

/* Some neighbouring bags, and their ids. */
struct span {
    int64_t first_bag, last_bag, first_id, last_id;
};

/* Sorts the ids of one table by counting them, and says which bag each is in; and its weight, if
   there are any. Without `lengths` each id is a bag. `ends` is memory for a number per row, all
   zero; ids count from `first_row`. */
void sort_by_row(const int32_t *restrict ids, const int32_t *restrict lengths,
                 const float *restrict weights, const struct span *restrict spans,
                 int64_t num_spans, int32_t first_row, int64_t num_rows, int32_t *restrict ends,
                 int32_t *restrict sorted, int32_t *restrict bags, float *restrict sorted_weights)
{
    for (const struct span *s = spans; s < spans + num_spans; s++)
        for (int64_t i = s->first_id; i < s->last_id; i++)
            ends[ids[i] - first_row]++;
    for (int64_t row = 0, sum = 0; row < num_rows; row++) {
        const int32_t count = ends[row];
        ends[row] = (int32_t)sum;
        sum += count;
    }
    for (const struct span *s = spans; s < spans + num_spans; s++) {
        int64_t i = s->first_id;
        for (int64_t bag = s->first_bag; bag < s->last_bag; bag++)
            for (const int64_t end = i + (lengths ? lengths[bag] : 1); i < end; i++) {
                const int32_t row = ids[i] - first_row, at = ends[row]++;
                sorted[at] = row;
                bags[at] = (int32_t)bag;
                if (weights)
                    sorted_weights[at] = weights[i];
            }
    }
}
