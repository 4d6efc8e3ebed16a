/* Version of the daemon and its engine: one place, shown by hello, attach, ps and `gradd version`.
 */
#ifndef GRADD_SERVER_VERSION_H
#define GRADD_SERVER_VERSION_H

#define GRADD_VERSION "0.1.0"

#endif
