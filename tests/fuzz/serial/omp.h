/* OpenMP with one thread, for the fuzz build only.
 *
 * clang cannot read gcc's omp.h and its own runtime is one more package; one thread is all that a
 * fuzz target may use. The build passes -fno-openmp, so `#pragma omp` is ignored.
 */
#ifndef GRADD_TESTS_FUZZ_SERIAL_OMP_H
#define GRADD_TESTS_FUZZ_SERIAL_OMP_H

static inline int omp_get_max_threads(void) {
    return 1;
}

static inline int omp_get_num_threads(void) {
    return 1;
}

static inline int omp_get_thread_num(void) {
    return 0;
}

static inline int omp_get_num_procs(void) {
    return 1;
}

static inline void omp_set_dynamic(int on) {
    (void)on;
}

static inline void omp_set_num_threads(int n) {
    (void)n;
}

#endif
