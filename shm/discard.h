/* Closing descriptors received from another process, and unmapping memory, without waiting for it.
 *
 * For anything but memory, close() can take as long as the sender likes: a socket with SO_LINGER
 * waits for its peer, a file of a FUSE file system for its process. Such descriptors are closed by
 * separate threads, of which there are few: those that they cannot take stay open until a thread is
 * free again. Memory is the kernel's alone, but giving a GiB of it back takes a tenth of a second:
 * that is done by a thread, and small memory at once.
 */
#ifndef GRADD_SHM_DISCARD_H
#define GRADD_SHM_DISCARD_H

#include <stdint.h>

/* Any thread; never waits. -1 is accepted. */
void gradd_discard(int fd);
/* The same for a mapping, of whole pages; nothing may use the addresses any more. */
void gradd_discard_mapping(void *base, uint64_t bytes);
/* Waits until the memory that was given to the thread is back. */
void gradd_discard_wait(void);

#endif
