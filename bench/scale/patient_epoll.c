/* Preloaded by ranks.py: the thread of each Gloo group, which looks for messages 100 times a second
   though none has come, looks twice a second. A message still wakes it at once.

   A rank has five groups: 512 ranks on two cores would do nothing but wake up 256,000 times a second. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/epoll.h>

enum { GLOO_MS = 10, PATIENT_MS = 500 };

int epoll_wait(int epoll, struct epoll_event *events, int count, int timeout_ms) {
    static int (*original)(int, struct epoll_event *, int, int);
    if (!original) original = (int (*)(int, struct epoll_event *, int, int))dlsym(RTLD_NEXT, "epoll_wait");
    return original(epoll, events, count, timeout_ms == GLOO_MS ? PATIENT_MS : timeout_ms);
}
