/* Ends the process with a sentence where the processor lacks instructions that this binary is
 * compiled for; without it the process would die of SIGILL somewhere.
 *
 * It runs before main() and the binary's other constructors. Libraries are compiled for every
 * processor. Nothing but these few lines is compiled without those instructions, so they call
 * functions of libc alone. clang before 18 does not know the levels, and checks nothing.
 */
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__AVX2__) && (!defined(__clang__) || __clang_major__ >= 18)
#ifdef __AVX512F__
#define LEVEL "x86-64-v4"
#else
#define LEVEL "x86-64-v3"
#endif

__attribute__((constructor(101), target("arch=x86-64"))) static void check_processor(void) {
    static const char text[] =
        "gradd: this processor lacks AVX2 or other instructions of " LEVEL
        ", which gradd is compiled for: build it with another ARCH (make ARCH=-march=native)\n";
    __builtin_cpu_init();
    if (__builtin_cpu_supports(LEVEL)) return;
    if (write(STDERR_FILENO, text, strlen(text)) < 0) _exit(2);
    _exit(1);
}
#endif
