/* Products by cuBLASLt, as far as its stand-in tells (tests/emu/lt.h): operands that are less
 * aligned than tensors are, and algorithms that are measured and kept. */
#include "kernels/cases/cases.h"
#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "kernels/cuda/product/kept.h"
#include "tests/c/eager.h"
#include "tests/emu/device.h"
#include "tests/emu/lt.h"
#include "tests/sim/sim.h"
#include "tests/test.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TENSOR = 64, MOST_SHIFT = 64 }; /* where tensors begin; bytes that one is moved by */

typedef struct emu_product_s {
    const gradd_op_t *op;
    const gradd_kernel_t *kernel;
    gradd_case_data_t data;
    gradd_type_t types[2]; /* of results */
    gradd_infer_t c;
    gradd_prepared_t prepared;
    void *workspace;
} emu_product_t;

static void *aligned(size_t bytes) {
    void *p = aligned_alloc(TENSOR, (bytes + MOST_SHIFT + TENSOR) / TENSOR * TENSOR);
    CHECK(p != NULL);
    return p;
}

static void open_product(emu_product_t *p, const char *op, const char *text, gradd_dtype_t dtype) {
    *p = (emu_product_t){.op = gradd_op_by_name(op)};
    CHECK_OK(gradd_case_parse(text, dtype, 11, &p->data));
    p->c = (gradd_infer_t){
        .op = p->op,
        .attrs = {p->data.attrs, p->data.n_attrs},
        .opset = eager_opset(p->op),
        .n_in = p->data.n_in,
        .n_out = p->data.n_out ? p->data.n_out : 1,
        .in = p->data.in,
        .out = p->types,
        .threads = 1
    };
    CHECK_OK(gradd_op_infer(&p->c));
    p->kernel = gradd_backend_kernel(&gradd_backend_emu, &p->c);
    CHECK(p->kernel != NULL);
    CHECK_OK(gradd_kernel_prepare(p->kernel, &p->c, &p->prepared));
    p->workspace = aligned(p->prepared.workspace);
}

static void close_product(emu_product_t *p) {
    gradd_kernel_unprepare(p->kernel, &p->prepared);
    free(p->workspace);
    gradd_case_free(&p->data);
}

static size_t result_bytes(const emu_product_t *p) {
    return (size_t)gradd_type_bytes(&p->types[0]) * (size_t)p->c.n_out; /* they are alike */
}

/* The results, one behind the other, in memory of their own, with operand `moved` (from n_in on: a
 * result) `shift` bytes behind where tensors begin. */
static gradd_status_t multiply(const emu_product_t *p, int moved, size_t shift, void **out) {
    gradd_view_t in[GRADD_OP_MAX_IN], results[2];
    const int n = p->c.n_in;
    const size_t bytes = (size_t)gradd_type_bytes(&p->types[0]);
    void *from[GRADD_OP_MAX_IN], *to[2];
    for (int i = 0; i < n; i++) {
        const size_t size = (size_t)gradd_type_bytes(&p->data.in[i].type);
        in[i] = p->data.in[i];
        from[i] = aligned(size);
        in[i].data = (char *)from[i] + (i == moved ? shift : 0);
        memcpy(in[i].data, p->data.in[i].data, size);
    }
    for (int j = 0; j < p->c.n_out; j++) {
        to[j] = aligned(bytes);
        results[j] = (gradd_view_t){p->types[j], (char *)to[j] + (moved == n + j ? shift : 0)};
    }
    const gradd_launch_t r = {.op = p->op,
                              .attrs = p->c.attrs,
                              .opset = p->c.opset,
                              .n_in = n,
                              .n_out = p->c.n_out,
                              .in = in,
                              .out = results,
                              .workspace = p->workspace,
                              .state = p->prepared.state,
                              .threads = 1};
    const gradd_status_t status = emu_compute(p->kernel, &r);
    *out = aligned(result_bytes(p));
    for (int j = 0; j < p->c.n_out; j++) {
        memcpy((char *)*out + bytes * (size_t)j, results[j].data, bytes);
        free(to[j]);
    }
    for (int i = 0; i < n; i++)
        free(from[i]);
    return status;
}

/* ---- alignment ------------------------------------------------------------------------------- */

static const struct {
    const char *op, *text;
} shapes[] = {
    {"MatMul",      "f32[5,8] f32[8,16]"                     },
    {"MatMul",      "f32[5,7] f32[7,3]"                      },
    {"FusedMatMul", "f32[7,5] f32[7,3] | transA=1 alpha=0.5" },
    {"Linear",      "f32[5,8] f32[8,16] f32[16]"             },
    {"Linear",      "f32[2,3,7] f32[9,7] f32[9] | transB=1"  },
    {"MatMul",      "f32[3,5,7] f32[3,7,5]"                  },
    {"MatMul",      "f32[2,1,3,5] f32[2,4,5,3]"              },
    {"Gemm",        "f32[5,8] f32[8,16] f32[5,16] | beta=0.5"},
};

/* Any operand may lie anywhere, down to its elements' size; the bits are the same. */
static void move_operands(const char *op, const char *text, gradd_dtype_t dtype) {
    emu_product_t p;
    void *want, *got;
    open_product(&p, op, text, dtype);
    CHECK_OK(multiply(&p, -1, 0, &want));
    for (int moved = 0; moved < p.c.n_in + p.c.n_out; moved++)
        for (size_t shift = gradd_dtype_bytes(dtype); shift <= 32; shift *= 2) {
            CHECK_OK(multiply(&p, moved, shift, &got));
            CHECK(!memcmp(got, want, result_bytes(&p)));
            free(got);
        }
    free(want);
    close_product(&p);
}

TEST(operands_of_products_lie_anywhere) {
    static const gradd_dtype_t types[] = {GRADD_DT_F32, GRADD_DT_BF16, GRADD_DT_F64};
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++)
        for (int t = 0; t < 3; t++)
            move_operands(shapes[k].op, shapes[k].text, types[t]);
    move_operands("LinearGelu", "f32[5,7] f32[7,16] f32[16]", GRADD_DT_BF16);
    move_operands("LinearGelu", "f32[5,7] f32[7,16] f32[16] -> 2", GRADD_DT_BF16);
    move_operands("LinearGelu", "f32[5,7] f32[7,13] f32[13] -> 2", GRADD_DT_F16);
}

/* The choice for less is taken where it is needed and nowhere else. */
TEST(aligned_operands_have_the_first_choice) {
    emu_product_t p;
    void *out;
    open_product(&p, "Linear", "f32[5,8] f32[8,16] f32[16]", GRADD_DT_BF16);
    for (int moved = -1; moved <= 3; moved++)
        for (size_t shift = 2; shift <= 64; shift *= 2) {
            CHECK_OK(multiply(&p, moved, shift, &out));
            CHECK_EQ_INT(emu_lt()->last_align, moved < 0 || shift >= 16 ? 16 : 2);
            free(out);
        }
    close_product(&p);
}

/* Calls of an outer batch step through the operands: the second one of 15 elements of f32 leaves 4
 * bytes, and the library was told so of that side alone. */
TEST(steps_of_a_batch_are_promised) {
    emu_product_t p;
    void *out;
    const int before = emu_lt()->proposals;
    open_product(&p, "MatMul", "f32[2,1,4,5] f32[2,3,5,3]", GRADD_DT_F32);
    CHECK_EQ_INT(emu_lt()->proposals, before + 2);
    CHECK_OK(multiply(&p, -1, 0, &out));
    free(out);
    close_product(&p);
}

/* The stand-in checks the given alignment: if it is wrong, it refuses, and says which side. */
TEST(the_stand_in_sees_a_broken_promise) {
    emu_product_t p;
    void *out;
    open_product(&p, "MatMul", "f32[2,8] f32[8,8]", GRADD_DT_F32);
    for (int moved = 0; moved <= 2; moved++) {
        emu_lt()->wants = 32; /* as an algorithm would that was chosen for more than was true */
        CHECK_STATUS(GRADD_E_DEVICE, multiply(&p, moved, 16, &out));
        CHECK_ERROR_HAS("invalid value");
        free(out);
        emu_lt()->wants = 0;
        CHECK_OK(multiply(&p, moved, 16, &out));
        free(out);
    }
    close_product(&p);
}

/* ---- measured and kept ----------------------------------------------------------------------- */

static char cache[64], file[400]; /* the user's folder, and the file that is in it */

static void use_cache(void) {
    snprintf(cache, sizeof cache, "/tmp/gradd-test-XXXXXX");
    CHECK(mkdtemp(cache) != NULL);
    CHECK(!setenv("XDG_CACHE_HOME", cache, 1));
    CHECK(!setenv("GRADD_CUDA_TUNE", "all", 1));
    gpu_kept_forget();
}

static void drop_cache(void) {
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s", cache);
    CHECK_EQ_INT(system(command), 0);
}

static int find_files(void) {
    char folder[200];
    int n = 0;
    snprintf(folder, sizeof folder, "%s/gradd/products", cache);
    DIR *dir = opendir(folder);
    for (struct dirent *e; dir && (e = readdir(dir));)
        if (e->d_name[0] != '.') snprintf(file, sizeof file, "%s/%.180s", folder, e->d_name), n++;
    if (dir) closedir(dir);
    return n;
}

/* As in another process: the algorithm that a product takes where measuring would find `fastest`.
 */
static int choose(const char *text, int fastest) {
    emu_product_t p;
    void *out;
    gpu_kept_forget();
    emu_lt()->fastest = fastest;
    open_product(&p, "MatMul", text, GRADD_DT_F32);
    CHECK_OK(multiply(&p, -1, 0, &out));
    free(out);
    close_product(&p);
    return emu_lt()->last;
}

#define SHAPE "f32[5,8] f32[8,16]"

static void write_file(const char *mode, const char *text) {
    CHECK_EQ_INT(find_files(), 1);
    FILE *f = fopen(file, mode);
    CHECK(f != NULL);
    CHECK(fputs(text, f) >= 0 && !fclose(f));
}

static int count_lines(void) {
    int n = 0;
    CHECK_EQ_INT(find_files(), 1);
    FILE *f = fopen(file, "r");
    CHECK(f != NULL);
    for (int c; (c = fgetc(f)) != EOF;)
        n += c == '\n';
    fclose(f);
    return n;
}

TEST(a_measured_algorithm_is_kept) {
    struct stat st;
    use_cache();
    CHECK_EQ_INT(choose(SHAPE, 2), 2);
    CHECK_EQ_INT(choose(SHAPE, 3), 2);
    CHECK_EQ_INT(sim_events(), 2);
    CHECK_EQ_INT(choose("f32[5,8] f32[8,17]", 3), 3);
    CHECK_EQ_INT(choose("f32[5,8] f32[8,17]", 1), 3);
    CHECK_EQ_INT(sim_events(), 4);
    CHECK_EQ_INT(count_lines(), 3);
    CHECK(!stat(file, &st) && (st.st_mode & 0777) == 0600);
    CHECK(strstr(gpu_kept_text(), "2 measured algorithms in /tmp/gradd-test-"));
    *strrchr(file, '/') = 0;
    CHECK(!stat(file, &st) && (st.st_mode & 0777) == 0700);
    drop_cache();
}

/* Whatever differs in the key is another product. */
TEST(what_a_choice_depends_on) {
    static const char *const texts[] = {"f32[2,8] f32[8,16]", "f32[8,2] f32[8,16] | transA=1",
                                        "f32[3,2,8] f32[8,16]", "f32[3,2,8] f32[3,8,16]",
                                        "f32[2,8] f32[16,8] | transB=1"};
    emu_product_t p;
    use_cache();
    emu_lt()->fastest = 1;
    for (int k = 0; k < 5; k++)
        for (int t = 0; t < 2; t++) {
            open_product(&p, "FusedMatMul", texts[k], t ? GRADD_DT_BF16 : GRADD_DT_F32);
            close_product(&p);
        }
    CHECK_EQ_INT(count_lines(), 11);
    open_product(&p, "Linear", "f32[2,8] f32[8,16] f32[16]", GRADD_DT_F32);
    close_product(&p);
    CHECK_EQ_INT(count_lines(), 12);
    open_product(&p, "FusedMatMul", "f32[2,8] f32[8,16] | alpha=0.5", GRADD_DT_F32);
    close_product(&p);
    CHECK_EQ_INT(count_lines(), 12);
    open_product(&p, "LinearGelu", "f32[2,8] f32[8,16] f32[16]", GRADD_DT_F16);
    close_product(&p);
    open_product(&p, "LinearGelu", "f32[2,8] f32[8,16] f32[16] -> 2", GRADD_DT_F16);
    close_product(&p);
    CHECK_EQ_INT(count_lines(), 14);
    drop_cache();
}

TEST(damaged_lines_are_no_lines) {
    use_cache();
    CHECK_EQ_INT(choose(SHAPE, 2), 2);
    write_file("a", "nonsense\n|||\nf32>f32 5x16x8|0000000000000000 \ntorn by a ki");
    CHECK_EQ_INT(choose(SHAPE, 3), 2);
    CHECK_EQ_INT(choose("f32[5,8] f32[8,9]", 3), 3);
    CHECK_EQ_INT(choose("f32[5,8] f32[8,9]", 1), 3);
    CHECK_EQ_INT(choose(SHAPE, 3), 2);
    /* one digit of the first choice */
    FILE *f = fopen(file, "r+");
    char text[2000];
    const size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    char *bar = strstr(strchr(text, '\n'), "|");
    bar[3] ^= 1;
    rewind(f);
    CHECK(fwrite(text, 1, n, f) == n && !fclose(f));
    CHECK_EQ_INT(choose(SHAPE, 1), 1);
    CHECK_EQ_INT(choose(SHAPE, 3), 1);
    CHECK_EQ_INT(choose("f32[5,8] f32[8,9]", 1), 3);
    drop_cache();
}

TEST(a_file_of_something_else_begins_anew) {
    static const char *const texts[] = {"", "no end of a line", "gradd products 0 | of before\n",
                                        "\n\n"};
    use_cache();
    CHECK_EQ_INT(choose(SHAPE, 2), 2);
    for (int k = 0; k < 4; k++) {
        write_file("w", texts[k]);
        CHECK_EQ_INT(choose(SHAPE, k % 2), k % 2);
        CHECK_EQ_INT(choose(SHAPE, 3), k % 2);
        CHECK_EQ_INT(count_lines(), 2);
    }
    drop_cache();
}

TEST(other_versions_measure_anew) {
    use_cache();
    CHECK_EQ_INT(choose(SHAPE, 2), 2);
    emu_lt()->version = 130200;
    CHECK_EQ_INT(choose(SHAPE, 3), 3);
    sim_settings()->driver = 13010;
    CHECK_EQ_INT(choose(SHAPE, 1), 1);
    CHECK_EQ_INT(find_files(), 3);
    emu_lt()->version = 0;
    sim_settings()->driver = 0;
    CHECK_EQ_INT(choose(SHAPE, 1), 2);
    drop_cache();
}

/* The file's last line of a product counts. */
TEST(what_the_library_refuses_is_measured_anew) {
    use_cache();
    CHECK_EQ_INT(choose(SHAPE, 2), 2);
    emu_lt()->refuses_kept = 1;
    CHECK_EQ_INT(choose(SHAPE, 3), 3);
    CHECK_EQ_INT(count_lines(), 3);
    CHECK_EQ_INT(choose(SHAPE, 1), 3);
    drop_cache();
}

/* Another start would find something else: so it is not measured at all. */
TEST(without_a_place_to_keep_it_the_first_is_taken) {
    char at[200];
    use_cache();
    snprintf(at, sizeof at, "%s/gradd", cache);
    CHECK(!close(open(at, O_CREAT | O_WRONLY, 0600))); /* where the folder would be */
    CHECK_EQ_INT(choose(SHAPE, 2), 0);
    CHECK_EQ_INT(sim_events(), 0);
    CHECK(strstr(gpu_kept_text(), "no algorithm is measured, for none can be kept: /tmp/gradd-"));
    CHECK(!unlink(at));
    CHECK_EQ_INT(choose(SHAPE, 2), 2);
    CHECK_EQ_INT(find_files(), 1);
    CHECK(!unlink(file) && !symlink("/dev/full", file));
    CHECK_EQ_INT(choose(SHAPE, 2), 0);
    CHECK(!unsetenv("XDG_CACHE_HOME") && !unsetenv("HOME"));
    CHECK_EQ_INT(choose(SHAPE, 2), 0);
    CHECK(strstr(gpu_kept_text(), "neither XDG_CACHE_HOME nor HOME"));
    drop_cache();
}

TEST(measuring_can_be_switched_off) {
    use_cache();
    CHECK(!setenv("GRADD_CUDA_TUNE", "0", 1));
    CHECK_EQ_INT(choose(SHAPE, 2), 0);
    CHECK(strstr(gpu_kept_text(), "GRADD_CUDA_TUNE"));
    CHECK(!setenv("GRADD_CUDA_TUNE", "1", 1));
    CHECK_EQ_INT(choose(SHAPE, 2), 0); /* not worth it */
    CHECK_EQ_INT(find_files(), 0);
    drop_cache();
}

enum { WRITERS = 4, PRODUCTS = 12 };

/* All take the choice of the first process, whatever they measure themselves. */
TEST_LIMIT(processes_that_write_at_once_agree, 60) {
    int (*chosen)[PRODUCTS] = mmap(NULL, sizeof *chosen * (WRITERS + 1), PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char text[PRODUCTS][40];
    CHECK(chosen != MAP_FAILED);
    use_cache();
    for (int k = 0; k < PRODUCTS; k++)
        snprintf(text[k], sizeof text[k], "f32[2,3] f32[3,%d]", k + 2);
    for (int w = 0; w < WRITERS; w++) {
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid) continue;
        for (int k = 0; k < PRODUCTS; k++)
            chosen[w][(k + w) % PRODUCTS] = choose(text[(k + w) % PRODUCTS], w);
        _exit(0);
    }
    for (int w = 0, how; w < WRITERS; w++)
        CHECK(wait(&how) > 0 && WIFEXITED(how) && !WEXITSTATUS(how));
    for (int k = 0; k < PRODUCTS; k++) {
        chosen[WRITERS][k] = choose(text[k], 0);
        for (int w = 0; w < WRITERS; w++)
            CHECK_EQ_INT(chosen[w][k], chosen[WRITERS][k]);
    }
    CHECK_EQ_INT(count_lines(), PRODUCTS + 1);
    drop_cache();
}
