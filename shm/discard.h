/* Closing descriptors received from another process, without waiting for it.
 *
 * For anything but memory, close() can take as long as the sender likes: a socket with SO_LINGER
 * waits for its peer, a file of a FUSE file system for its process. Memory is closed at once,
 * everything else by separate threads, of which there are few: descriptors that they cannot take
 * stay open until a thread is free again.
 */
#ifndef GRADD_SHM_DISCARD_H
#define GRADD_SHM_DISCARD_H

/* Any thread; never waits. -1 is accepted. */
void gradd_discard(int fd);

#endif
