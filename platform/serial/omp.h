/* OpenMP with one thread, for compilers without it: WebAssembly, and the fuzz build (clang cannot
 * read gcc's omp.h, its own runtime is one more package, and one thread is all that a fuzz target
 * may use). `#pragma omp` is ignored there.
 */
#ifndef GRADD_PLATFORM_SERIAL_OMP_H
#define GRADD_PLATFORM_SERIAL_OMP_H

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
