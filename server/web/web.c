/* See web.h. One thread of libmicrohttpd answers; this one waits for the end. */
#include "server/web/web.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/web/metrics.h"
#include "server/web/mhd.h"
#include "server/wire/print.h"

#define TOKEN_FILE    "web.token"
#define TOKEN_BYTES   16
#define TOKEN_TEXT    (2 * TOKEN_BYTES)
#define MOST_CLIENTS  32
#define IDLE_SECONDS  15
#define REQUEST_BYTES (16 << 10)

static const char page_html[] =
#include "web_page.html.inc"
    ;
static const char page_css[] =
#include "web_page.css.inc"
    ;
static const char page_js[] =
#include "web_page.js.inc"
    ;

typedef struct web_s {
    const web_options_t *options; /* Borrowed */
    mhd_t mhd;
    char token[TOKEN_TEXT + 1]; /* "": paths have none */
} web_t;

/* ---- the token ---- */

static bool is_token(const char *text, ssize_t n) {
    return n >= TOKEN_TEXT && strspn(text, "0123456789abcdef") >= TOKEN_TEXT;
}

/* It stays the same as long as the directory, for a scraper's configuration. */
static gradd_status_t find_token(const rundir_t *dir, char token[TOKEN_TEXT + 1]) {
    uint8_t drawn[TOKEN_BYTES];
    char text[TOKEN_TEXT + 1] = "";
    const int fd = rundir_open(dir->folder, TOKEN_FILE, O_RDWR | O_CREAT);
    if (fd < 0) return GRADD_FAIL(IO, "%s/" TOKEN_FILE ": %s", dir->path, strerror(errno));
    gradd_status_t st = GRADD_OK;
    if (!is_token(text, pread(fd, text, TOKEN_TEXT, 0))) {
        if (getrandom(drawn, sizeof drawn, 0) != (ssize_t)sizeof drawn)
            st = GRADD_FAIL(IO, "getrandom: %s", strerror(errno));
        for (int i = 0; i < TOKEN_BYTES; i++)
            snprintf(text + 2 * i, 3, "%02x", drawn[i]);
        if (st == GRADD_OK && pwrite(fd, text, TOKEN_TEXT, 0) != TOKEN_TEXT)
            st = GRADD_FAIL(IO, "%s/" TOKEN_FILE ": %s", dir->path, strerror(errno));
    }
    memcpy(token, text, sizeof text);
    close(fd);
    return st;
}

/* The path behind "/TOKEN"; NULL: there is no such page. Takes the same time wherever the first
 * difference is. */
static const char *behind_token(const web_t *web, const char *url) {
    uint8_t difference = 0;
    if (!web->token[0]) return url;
    if (strlen(url) < TOKEN_TEXT + 2 || url[0] != '/') return NULL;
    for (int i = 0; i < TOKEN_TEXT; i++)
        difference |= (uint8_t)(url[1 + i] ^ web->token[i]);
    return difference == 0 && url[1 + TOKEN_TEXT] == '/' ? url + 1 + TOKEN_TEXT : NULL;
}

/* ---- what is said ---- */

static void print_health(const web_t *web, FILE *out, unsigned *out_status);
static void print_metrics(const web_t *web, FILE *out, unsigned *out_status);
static void print_status(const web_t *web, FILE *out, unsigned *out_status);

typedef struct route_s {
    const char *path, *type;
    const char *text; /* Borrowed; NULL: */
    void (*print)(const web_t *web, FILE *out, unsigned *out_status);
} route_t;

static const route_t routes[] = {
    {"/",            "text/html; charset=utf-8",                 page_html, NULL         },
    {"/page.css",    "text/css; charset=utf-8",                  page_css,  NULL         },
    {"/page.js",     "text/javascript; charset=utf-8",           page_js,   NULL         },
    {"/status.json", "application/json",                         NULL,      print_status },
    {"/metrics",     "text/plain; version=0.0.4; charset=utf-8", NULL,      print_metrics},
    {"/healthz",     "text/plain; charset=utf-8",                NULL,      print_health },
};
#define N_ROUTES (sizeof routes / sizeof *routes)

typedef struct health_s {
    int n, n_silent;
} health_t;

static void count(const web_daemon_t *daemon, void *visitor) {
    health_t *health = visitor;
    health->n++;
    health->n_silent += !daemon->root;
}

static void print_health(const web_t *web, FILE *out, unsigned *out_status) {
    health_t health = {0, 0};
    web->options->look(web->options->context, count, &health);
    if (health.n == 0)
        fputs("no daemon runs\n", out);
    else if (health.n_silent)
        fprintf(out, "%d of %d daemons do not answer\n", health.n_silent, health.n);
    else
        fputs("ok\n", out);
    if (health.n == 0 || health.n_silent) *out_status = MHD_HTTP_SERVICE_UNAVAILABLE;
}

static void take(const web_daemon_t *daemon, void *visitor) {
    metrics_take(visitor, daemon);
}

static void print_metrics(const web_t *web, FILE *out, unsigned *out_status) {
    static metrics_t metrics; /* large; one thread answers */
    (void)out_status;
    metrics.n = 0;
    web->options->look(web->options->context, take, &metrics);
    metrics_print(&metrics, out);
}

typedef struct daemon_list_s {
    FILE *out;
    int n;
} daemon_list_t;

static void print_daemon(const web_daemon_t *daemon, void *visitor) {
    const msgpack_object name = {
        .type = MSGPACK_OBJECT_STR,
        .via.str = {.ptr = daemon->name, .size = (uint32_t)strlen(daemon->name)}
    };
    daemon_list_t *list = visitor;
    fputs(list->n++ ? ", {\"name\": " : "{\"name\": ", list->out);
    print_json(list->out, &name);
    if (daemon->root) {
        fputs(", ", list->out);
        print_pairs(list->out, daemon->root);
    }
    if (daemon->kept) {
        fputs(", \"kept\": ", list->out);
        print_json(list->out, daemon->kept);
    }
    fputc('}', list->out);
}

static void print_status(const web_t *web, FILE *out, unsigned *out_status) {
    daemon_list_t list = {out, 0};
    (void)out_status;
    fputs("{\"daemons\": [", out);
    web->options->look(web->options->context, print_daemon, &list);
    fputs("]}\n", out);
}

/* ---- answers ---- */

static enum MHD_Result answer(const web_t *web, struct MHD_Connection *connection, unsigned status,
                              const char *type, struct MHD_Response *response) {
    static const char *const headers[][2] = {
        {"Cache-Control",           "no-store"                                                                     },
        {"Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; "
                                    "connect-src 'self'; img-src data:; base-uri 'none'; "
                                    "form-action 'none'; frame-ancestors 'none'"},
        {"Referrer-Policy",         "no-referrer" /* the token is in the address */                                },
        {"X-Content-Type-Options",  "nosniff"                                                                      },
    };
    if (!response) return MHD_NO;
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++)
        web->mhd.add_header(response, headers[i][0], headers[i][1]);
    web->mhd.add_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    const enum MHD_Result result = web->mhd.queue_response(connection, status, response);
    web->mhd.destroy_response(response);
    return result;
}

static enum MHD_Result answer_text(const web_t *web, struct MHD_Connection *connection,
                                   unsigned status, const char *type, const char *text) {
    /* It is not written to. */
    struct MHD_Response *response =
        web->mhd.create_response(strlen(text), (void *)(uintptr_t)text, MHD_RESPMEM_PERSISTENT);
    return answer(web, connection, status, type, response);
}

static enum MHD_Result answer_printed(const web_t *web, struct MHD_Connection *connection,
                                      const route_t *route) {
    char *text = NULL;
    size_t bytes = 0;
    unsigned status = MHD_HTTP_OK;
    FILE *out = open_memstream(&text, &bytes);
    if (!out) return MHD_NO;
    route->print(web, out, &status);
    if (fclose(out) != 0) {
        free(text);
        return MHD_NO;
    }
    struct MHD_Response *response = web->mhd.create_response(bytes, text, MHD_RESPMEM_MUST_FREE);
    if (!response) free(text);
    return answer(web, connection, status, route->type, response);
}

static enum MHD_Result handle(void *context, struct MHD_Connection *connection, const char *url,
                              const char *method, const char *version, const char *upload,
                              size_t *upload_bytes, void **of_connection) {
    static const char plain[] = "text/plain; charset=utf-8";
    const web_t *web = context;
    (void)version, (void)upload, (void)upload_bytes, (void)of_connection;
    const char *path = behind_token(web, url);
    if (!path)
        return answer_text(web, connection, MHD_HTTP_NOT_FOUND, plain,
                           "the address has no token, or another one: `gradd web` prints it\n");
    if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0)
        return answer_text(web, connection, MHD_HTTP_METHOD_NOT_ALLOWED, plain, "GET only\n");
    for (size_t i = 0; i < N_ROUTES; i++) {
        if (strcmp(routes[i].path, path) != 0) continue;
        return routes[i].text
                   ? answer_text(web, connection, MHD_HTTP_OK, routes[i].type, routes[i].text)
                   : answer_printed(web, connection, &routes[i]);
    }
    return answer_text(web, connection, MHD_HTTP_NOT_FOUND, plain, "there is no such page\n");
}

/* ---- listening ---- */

static gradd_status_t listen_on_loopback(int port, int *out_fd, int *out_port) {
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof address;
    const int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return GRADD_FAIL(IO, "web: socket: %s", strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (const struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 16) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &n) == 0) {
        *out_fd = fd;
        *out_port = ntohs(address.sin_port);
        return GRADD_OK;
    }
    const gradd_status_t st = GRADD_FAIL(IO, "web: 127.0.0.1:%d: %s", port, strerror(errno));
    close(fd);
    return st;
}

/* A socket at the path on which nothing listens goes; any other file stays. */
static void remove_stale(const struct sockaddr_un *address) {
    struct stat info;
    if (lstat(address->sun_path, &info) != 0 || !S_ISSOCK(info.st_mode)) return;
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    if (connect(fd, (const struct sockaddr *)address, sizeof *address) != 0 &&
        errno == ECONNREFUSED)
        unlink(address->sun_path);
    close(fd);
}

static gradd_status_t listen_on_path(const char *path, int *out_fd) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        return GRADD_FAIL(IO, "web: --socket: the path has %zu bytes, the limit is %zu",
                          strlen(path), sizeof address.sun_path - 1);
    memcpy(address.sun_path, path, strlen(path) + 1);
    remove_stale(&address);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return GRADD_FAIL(IO, "web: socket: %s", strerror(errno));
    const mode_t mask = umask(0177);
    const bool bound = bind(fd, (const struct sockaddr *)&address, sizeof address) == 0;
    const int error = errno;
    umask(mask);
    if (bound && listen(fd, 16) == 0) {
        *out_fd = fd;
        return GRADD_OK;
    }
    const gradd_status_t st = GRADD_FAIL(IO, "web: %s: %s", path, strerror(bound ? errno : error));
    close(fd);
    return st;
}

static gradd_status_t begin(web_t *web, int *out_fd) {
    const web_options_t *options = web->options;
    int port = 0;
    if (options->socket) {
        GRADD_TRY(listen_on_path(options->socket, out_fd));
        printf("unix:%s\n", options->socket);
        return GRADD_OK;
    }
    GRADD_TRY(find_token(options->dir, web->token));
    GRADD_TRY(listen_on_loopback(options->port, out_fd, &port));
    printf("http://127.0.0.1:%d/%s/\n", port, web->token);
    return GRADD_OK;
}

static gradd_status_t serve(web_t *web, int fd, const sigset_t *ends) {
    int ended;
    struct MHD_Daemon *server = web->mhd.start_daemon(
        MHD_USE_POLL_INTERNAL_THREAD, 0, NULL, NULL, handle, web, MHD_OPTION_LISTEN_SOCKET, fd,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)MOST_CLIENTS, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)IDLE_SECONDS, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)REQUEST_BYTES,
        MHD_OPTION_END);
    if (!server) {
        close(fd);
        return GRADD_FAIL(IO, "web: libmicrohttpd does not start: %s", strerror(errno));
    }
    fflush(stdout);
    sigwait(ends, &ended);
    web->mhd.stop_daemon(server); /* closes the socket */
    return GRADD_OK;
}

gradd_status_t web_serve(const web_options_t *options) {
    static web_t web;
    sigset_t ends;
    int fd = -1;
    web = (web_t){.options = options};
    GRADD_TRY(mhd_open(&web.mhd));
    sigemptyset(&ends);
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGTERM);
    sigprocmask(SIG_BLOCK, &ends, NULL); /* before there is another thread */
    signal(SIGPIPE, SIG_IGN);
    GRADD_TRY(begin(&web, &fd));
    const gradd_status_t st = serve(&web, fd, &ends);
    if (options->socket) unlink(options->socket);
    return st;
}
