/* Closing descriptors that came from somebody else, where nobody waits.
 *
 * close() of what is no memory can take as long as its giver likes: a socket with SO_LINGER waits
 * for its peer, a file of a FUSE file system for its process. Memory is closed at once; all else by
 * a thread of its own, of which there are few: what they cannot take stays open until one is back.
 */
#ifndef GRADD_SHM_DISCARD_H
#define GRADD_SHM_DISCARD_H

/* Any thread; never waits. -1 is accepted. */
void gradd_discard(int fd);

#endif
