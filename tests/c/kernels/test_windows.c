/* Windows along an axis: what a model says of them is refused before memory or time follow it. */
#include <math.h>

#include "kernels/describe/resample.h"
#include "kernels/describe/windows.h"
#include "tests/test.h"

static gradd_torch_resample_t filtered(double scale) {
    return (gradd_torch_resample_t){
        .kind = GRADD_RESAMPLE_CUBIC, .antialias = true, .scale = scale};
}

TEST(scales_that_reach_beyond_an_integer_are_refused) {
    gradd_windows_t w;
    const double scales[] = {2.5e-19, 1e-300, -1, 1e300, NAN, INFINITY};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        const gradd_torch_resample_t how = filtered(scales[i]);
        CHECK_STATUS(GRADD_E_LIMIT, gradd_windows_torch(1000, 4, &how, &w));
        const gradd_onnx_resample_t onnx = {.antialias = true, .scale = scales[i]};
        CHECK(gradd_windows_onnx(1000, 4, &onnx, &w) != GRADD_OK);
    }
}

/* In f32 the places of late results are rounded; spans stay within their weights. */
TEST(taps_of_a_filter_stay_within_their_room) {
    const int64_t sizes[] = {3, 1000, 4097, 1 << 20, 1 << 30};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (int narrow = 0; narrow < 2; narrow++) {
            gradd_torch_resample_t how = filtered(0);
            gradd_windows_t w;
            how.narrow = narrow;
            const gradd_status_t status = gradd_windows_torch(sizes[i], 7, &how, &w);
            if (status == GRADD_E_LIMIT) continue;
            CHECK_OK(status);
            for (int64_t j = 0; j < w.out; j++) {
                double sum = 0;
                CHECK(w.span[2 * j + 1] >= 1 && w.span[2 * j + 1] <= w.width);
                CHECK(w.span[2 * j] >= 0 && w.span[2 * j] + w.span[2 * j + 1] <= w.n);
                for (int64_t t = 0; t < w.width; t++)
                    sum += w.weight[j * w.width + t];
                CHECK_NEAR(sum, 1.0, 1e-6);
            }
            gradd_windows_finish(&w);
        }
}

TEST(a_plan_does_not_turn_endless_windows_around) {
    const gradd_pool_axis_t axis = {.kernel = 1 << 20, .stride = 1, .dilation = 1};
    gradd_windows_t w, turned;
    CHECK_OK(gradd_windows_pool(1 << 21, &axis, &w));
    CHECK_STATUS(GRADD_E_LIMIT, gradd_windows_turned(&w, 1, &turned));
    CHECK_ERROR_HAS("elements together");
    gradd_windows_finish(&w);
}
