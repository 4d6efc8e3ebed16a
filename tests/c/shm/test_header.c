/* Headers of segments: what the daemon compares, and that no tensor lies in one. */
#include "shm/header.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shm/lease.h"
#include "tests/test.h"

enum { SIZE = 1 << 16, ID = 7, OWNER = 99 };

static const gradd_header_t good = {.magic = GRADD_HEADER_MAGIC,
                                    .version = GRADD_HEADER_VERSION,
                                    .header_bytes = GRADD_HEADER_BYTES,
                                    .bytes = SIZE,
                                    .id = ID,
                                    .owner = OWNER,
                                    .purpose = GRADD_SEGMENT_gradients};

static gradd_segment_t segment_with(const gradd_header_t *header, uint64_t bytes) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    CHECK_OK(gradd_segment_create("test", bytes, &segment));
    memcpy(segment.base, header, sizeof *header);
    return segment;
}

TEST(layout_of_a_header) {
    CHECK_EQ_INT(sizeof(gradd_header_t), 48);
    CHECK_EQ_INT(offsetof(gradd_header_t, bytes), 16);
    CHECK_EQ_INT(offsetof(gradd_header_t, owner), 32);
    CHECK_EQ_INT(offsetof(gradd_header_t, purpose), 40);
    CHECK(!memcmp(&good.magic, "GRADDSEG", 8));
    CHECK_EQ_STR(gradd_segment_purpose_name(GRADD_SEGMENT_ring), "ring");
    CHECK_EQ_STR(gradd_segment_purpose_name(GRADD_N_SEGMENT_PURPOSES), "other");
}

static void refused(const gradd_header_t *header, uint64_t owner, const char *why) {
    gradd_header_t read;
    gradd_segment_t segment = segment_with(header, SIZE);
    CHECK_STATUS(GRADD_E_SHM, gradd_header_read(segment.fd, ID, SIZE, owner, &read));
    CHECK_ERROR_HAS(why);
    gradd_segment_finish(&segment);
}

TEST(each_field_is_compared) {
    gradd_header_t h = good, read;
    gradd_segment_t segment = segment_with(&good, SIZE);
    CHECK_OK(gradd_header_read(segment.fd, ID, SIZE, 0, &read));
    CHECK_OK(gradd_header_read(segment.fd, ID, SIZE, OWNER, &read));
    CHECK(!memcmp(&read, &good, sizeof good));
    gradd_segment_finish(&segment);
    h.magic++, refused(&h, 0, "field 'magic': expected 0x4745534444415247, got 0x47455344");
    h = good, h.version = 2, refused(&h, 0, "field 'version': expected 1, got 2");
    h = good, h.header_bytes = 64, refused(&h, 0, "field 'header_bytes': expected 4096, got 64");
    h = good, h.bytes--, refused(&h, 0, "field 'bytes': expected 65536, got 65535");
    h = good, h.id = 8, refused(&h, 0, "field 'id': expected 7, got 8");
    h = good, h.owner = 0, refused(&h, 0, "field 'owner'");
    h = good, refused(&h, 98, "field 'owner': expected 98, got 99");
    h = good, h.purpose = 0, refused(&h, 0, "field 'purpose': expected 1 to 4, got 0");
    h = good, h.purpose = 5, refused(&h, 0, "field 'purpose': expected 1 to 4, got 5");
}

TEST(a_segment_without_room_for_one) {
    gradd_header_t read;
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    CHECK_OK(gradd_segment_create("test", 32, &segment));
    CHECK_STATUS(GRADD_E_SHM, gradd_header_read(segment.fd, ID, 32, 0, &read));
    CHECK_ERROR_HAS("a header alone takes 4096");
    CHECK_STATUS(GRADD_E_SHM, gradd_header_read(-1, ID, SIZE, 0, &read));
    gradd_segment_finish(&segment);
}

static gradd_lease_t *lease_of_this_process(int sockets[2]) {
    gradd_lease_t *lease = NULL;
    gradd_peer_t peer = GRADD_PEER_INIT;
    CHECK_EQ_INT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
    CHECK_OK(gradd_peer_identify(sockets[0], 0, GRADD_LEASE_AUTO, &peer));
    CHECK_OK(gradd_lease_create(&peer, (gradd_handle_limits_t){0}, &lease));
    return lease;
}

TEST(a_lease_knows_owner_purpose_and_header) {
    int sockets[2];
    void *address;
    uint64_t bytes[GRADD_N_SEGMENT_PURPOSES];
    gradd_lease_t *lease = lease_of_this_process(sockets);
    gradd_handle_table_t *table = gradd_lease_table(lease);
    gradd_segment_t one = segment_with(&good, SIZE), plain = segment_with(&good, SIZE);
    gradd_header_t h = good;
    h.id = 8, h.owner = 3;
    gradd_segment_t foreign = segment_with(&h, SIZE);
    CHECK_STATUS(GRADD_E_SHM, gradd_lease_add_headed(lease, 6, dup(one.fd), SIZE, NULL));
    CHECK_ERROR_HAS("segment 6: header: field 'id': expected 6, got 7");
    CHECK_STATUS(GRADD_E_SHM, gradd_lease_add_headed(lease, ID, dup(one.fd), SIZE + 1, NULL));
    CHECK_STATUS(GRADD_E_SHM, gradd_lease_add_headed(lease, ID, dup(STDIN_FILENO), SIZE, NULL));
    CHECK_OK(gradd_lease_add_headed(lease, ID, dup(one.fd), SIZE, NULL));
    CHECK_STATUS(GRADD_E_SHM, gradd_lease_add_headed(lease, 8, dup(foreign.fd), SIZE, NULL));
    CHECK_ERROR_HAS("field 'owner': expected 99, got 3");
    CHECK_OK(gradd_lease_add(lease, 1, dup(plain.fd), SIZE, NULL));
    CHECK_STATUS(GRADD_E_TENSOR, gradd_handle_resolve(table, ID, 4032, 64, 64, &address));
    CHECK_ERROR_HAS("offset 4032 of segment 7 lies in its header of 4096 bytes");
    CHECK_STATUS(GRADD_E_TENSOR, gradd_handle_resolve(table, ID, 0, 0, 64, &address));
    CHECK_OK(gradd_handle_resolve(table, ID, 4096, SIZE - 4096, 64, &address));
    CHECK_OK(gradd_handle_resolve(table, 1, 0, SIZE, 64, &address));
    gradd_handle_purpose_bytes(table, bytes);
    CHECK_EQ_INT(bytes[GRADD_SEGMENT_OTHER], SIZE);
    CHECK_EQ_INT(bytes[GRADD_SEGMENT_gradients], SIZE);
    CHECK_EQ_INT(bytes[GRADD_SEGMENT_parameters], 0);
    gradd_lease_end(lease);
    gradd_lease_destroy(lease);
    gradd_segment_finish(&one), gradd_segment_finish(&plain), gradd_segment_finish(&foreign);
    close(sockets[0]), close(sockets[1]);
}
