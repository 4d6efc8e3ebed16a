/* The C tests' vocabulary: TEST, CHECK and friends.
 *
 * A test is written as
 *
 *     TEST(truncation_is_refused)
 *     {
 *         CHECK_OK(gradd_segment_create("x", 4096, &segment));
 *         CHECK_EQ_INT(segment.bytes, 4096);
 *     }
 *
 * in a file tests/c/<room>/test_<module>.c and is known to the runner from then on as
 * "<module>.truncation_is_refused": the makefile reads the TEST(...) lines (which therefore start
 * in column 0). Every test runs in its own process with a time limit (10 s, or TEST_LIMIT's
 * seconds), so it may fork, leak, crash or hang without disturbing another. `make check` leaves out
 * the tests with a longer limit. A failed CHECK ends the test.
 */
#ifndef GRADD_TESTS_TEST_H
#define GRADD_TESTS_TEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"

#define TEST_JOIN_(a, b, c, d)    a##b##c##d
#define TEST_JOIN(a, b, c, d)     TEST_JOIN_(a, b, c, d)
#define TEST_SYMBOL(module, name) TEST_JOIN(gradd_test_, module, __, name)

/* TEST_MODULE is the file's module name, given by the makefile. */
#define TEST(name)                                                                                 \
    void TEST_SYMBOL(TEST_MODULE, name)(void);                                                     \
    void TEST_SYMBOL(TEST_MODULE, name)(void)
#define TEST_LIMIT(name, seconds) TEST(name)

/* Ends the test as failed, after printing file, line and the sentence. */
void test_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn, cold));
/* Ends the test as skipped; the runner lists it with its reason. Only for what this machine lacks.
 */
void test_skip(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn, cold));

void test_eq_int(const char *file, int line, const char *text_a, const char *text_b, intmax_t a,
                 intmax_t b);
void test_eq_str(const char *file, int line, const char *text_a, const char *text_b, const char *a,
                 const char *b);
typedef struct test_near_s {
    double a, b, tolerance;
} test_near_t;
void test_near(const char *file, int line, const char *text_a, const char *text_b,
               test_near_t values);
void test_ok(const char *file, int line, const char *text, gradd_status_t status);
void test_status(const char *file, int line, const char *text, gradd_status_t want,
                 gradd_status_t got);
void test_error_has(const char *file, int line, const char *part);

#define CHECK(cond) ((cond) ? (void)0 : test_fail(__FILE__, __LINE__, "%s", #cond))
/* Any integer operands; both are printed when they differ. */
#define CHECK_EQ_INT(a, b) test_eq_int(__FILE__, __LINE__, #a, #b, (intmax_t)(a), (intmax_t)(b))
#define CHECK_EQ_STR(a, b) test_eq_str(__FILE__, __LINE__, #a, #b, (a), (b))
/* |a - b| <= tolerance; NaN never passes. */
#define CHECK_NEAR(a, b, tolerance)                                                                \
    test_near(__FILE__, __LINE__, #a, #b,                                                          \
              (test_near_t){(double)(a), (double)(b), (double)(tolerance)})
/* A gradd_status_t expression that must be GRADD_OK; prints the error message otherwise. */
#define CHECK_OK(status) test_ok(__FILE__, __LINE__, #status, (status))
/* expr must fail with exactly this code: CHECK_STATUS(GRADD_E_SHM, gradd_segment_open(...)). */
#define CHECK_STATUS(code, expr) test_status(__FILE__, __LINE__, #expr, (code), (expr))
/* The last error message must contain this text: an error names what is wrong. */
#define CHECK_ERROR_HAS(part) test_error_has(__FILE__, __LINE__, (part))

#endif
