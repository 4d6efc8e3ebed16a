/* The frames of a connection, as they come by in pieces of any size. */
#include "server/host/connections.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/session/session.h"
#include "tests/test.h"

static uint8_t stream[1 << 17];
static size_t n_stream;

static void put_frame(uint8_t flags, uint64_t bytes) {
    stream[n_stream++] = flags;
    for (int i = flags & 2 ? 7 : 0; i >= 0; i--)
        stream[n_stream++] = (uint8_t)(bytes >> (8 * i));
    memset(stream + n_stream, 0xff, bytes); /* no flags of a frame that anybody sends */
    n_stream += bytes;
}

static void begin_stream(void) {
    memset(stream, 0x7f, 64);
    n_stream = 64;
    put_frame(4, 27); /* READY */
}

TEST(whole_messages_in_pieces) {
    begin_stream();
    for (int i = 0; i < 100; i++) {
        put_frame(1, 5);
        put_frame(3, 300);
        put_frame(4, 7); /* a command in between is no frame of the message */
        put_frame(0, 0);
    }
    for (size_t piece = 1; piece < 400; piece += 7) {
        frames_t frames = frames_begin();
        for (size_t at = 0; at < n_stream; at += piece)
            CHECK(frames_read(&frames, stream + at, piece < n_stream - at ? piece : n_stream - at));
        CHECK_EQ_INT(frames.n_frames, 0);
        CHECK_EQ_INT(frames.waiting, 100 * (305 + 3 * 64));
        CHECK_EQ_INT(frames.body, 0);
    }
}

TEST(a_message_without_an_end) {
    begin_stream();
    frames_t frames = frames_begin();
    CHECK(frames_read(&frames, stream, n_stream));
    n_stream = 0;
    put_frame(1, 1);
    for (int i = 0; i < CONNECTIONS_FRAMES; i++)
        CHECK(frames_read(&frames, stream, n_stream));
    CHECK_EQ_INT(frames.n_frames, CONNECTIONS_FRAMES);
    n_stream = 0;
    put_frame(0, 1);
    CHECK(!frames_read(&frames, stream, n_stream));
}

TEST(claims_do_not_overflow) {
    frames_t frames = frames_begin();
    n_stream = 64;
    const uint8_t head[] = {2, 255, 255, 255, 255, 255, 255, 255, 255};
    memcpy(stream + n_stream, head, sizeof head);
    n_stream += sizeof head;
    CHECK(frames_read(&frames, stream, n_stream));
    CHECK_EQ_INT(frames.waiting, 64);
    for (int i = 0; i < 100; i++)
        CHECK(frames_read(&frames, stream, sizeof stream));
    CHECK_EQ_INT(frames.n_frames, 0);
}

static bool is_ended(int end) {
    char byte;
    return recv(end, &byte, 1, MSG_DONTWAIT) == 0;
}

TEST(silent_ones_that_are_no_session_end) {
    int silent[2], kept[2], late[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, silent) == 0);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, kept) == 0);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, late) == 0);
    CHECK(connections_add(silent[0]) && connections_add(kept[0]));
    connections_keep(kept[0]);
    const int64_t now = session_now_ms();
    connections_expire(now + CONNECTIONS_SILENT_MS / 2);
    CHECK(!is_ended(silent[1]));
    connections_expire(now + CONNECTIONS_SILENT_MS + 1000);
    CHECK(is_ended(silent[1]));
    CHECK(!is_ended(kept[1]));
    /* Its number may be another file's by then. */
    close(silent[0]);
    CHECK_EQ_INT(dup2(late[0], silent[0]), silent[0]);
    connections_expire(now + 2 * CONNECTIONS_SILENT_MS);
    CHECK(!is_ended(late[1]));
}

TEST(time_in_which_nothing_ran_counts_against_none) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    CHECK(connections_add(ends[0]));
    const int64_t now = session_now_ms(), stood = 2 * CONNECTIONS_SILENT_MS;
    connections_forgive(stood);
    connections_expire(now + stood);
    CHECK(!is_ended(ends[1]));
    connections_expire(now + stood + CONNECTIONS_SILENT_MS + 1000);
    CHECK(is_ended(ends[1]));
}

TEST(one_process_has_so_many) {
    int ends[2], n = 0;
    for (;; n++) {
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        if (!connections_add(ends[0])) break;
        CHECK(n < CONNECTIONS_OF_PROCESS);
    }
    CHECK_EQ_INT(n, CONNECTIONS_OF_PROCESS);
    close(ends[0] - 2); /* one of those */
    CHECK(connections_add(ends[0]));
}
