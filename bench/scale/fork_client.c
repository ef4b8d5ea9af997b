/* python, as a rehearsal starts it: a fork of the warm parent for what imports torch.

   The job's --python is this program. Where its arguments name a part that imports torch, it has
   the warm parent (fork_parent.py) fork a process with its own files, folder, environment and
   namespaces, passes signals on, and ends as that process does. Else it executes the real Python. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <fcntl.h>

#ifndef PYTHON
#error "PYTHON: the real interpreter, FORK_SOCKET: where the warm parent listens"
#endif

extern char **environ;
static int server = -1;

static void pass_on(int number) {
    unsigned char byte = (unsigned char)number;
    if (write(server, &byte, 1) < 0) { /* the warm parent is gone; the read below ends */ }
}

static void fail(const char *text) {
    fprintf(stderr, "fork_client: %s: %s\n", text, strerror(errno));
    exit(127);
}

static int is_forked(int argc, char **argv) {
    int k;
    for (k = 1; k < argc && k < 6; k++) {
        const char *name = strrchr(argv[k], '/');
        name = name ? name + 1 : argv[k];
        if (!strcmp(name, "supervisor")) return 0;
        if (!strcmp(name, "elastic_agent") || !strcmp(name, "preflight.checks") ||
            !strcmp(name, "worker.py"))
            return 1;
    }
    return 0;
}

/* Send a count, then each word with its end. */
static void send_words(FILE *to, char **words) {
    int n = 0;
    while (words[n]) n++;
    fprintf(to, "%d", n);
    fputc(0, to);
    for (n = 0; words[n]; n++) fwrite(words[n], 1, strlen(words[n]) + 1, to);
}

int main(int argc, char **argv) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int files[4] = {0, 1, 2, open(".", O_RDONLY | O_DIRECTORY)};
    char control[CMSG_SPACE(sizeof files)] = {0}, *words = NULL;
    size_t size = 0;
    int32_t status;
    if (!is_forked(argc, argv)) {
        execv(PYTHON, argv);
        fail(PYTHON);
    }
    strcpy(address.sun_path, FORK_SOCKET);
    server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (server < 0 || connect(server, (struct sockaddr *)&address, sizeof address)) fail(FORK_SOCKET);
    FILE *text = open_memstream(&words, &size);
    fprintf(text, "%d", getpid());
    fputc(0, text);
    send_words(text, argv);
    send_words(text, environ);
    fclose(text);
    uint32_t length = (uint32_t)size;
    struct iovec part = {&length, sizeof length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof files);
    memcpy(CMSG_DATA(header), files, sizeof files);
    struct sigaction action = {.sa_handler = pass_on, .sa_flags = SA_RESTART};
    int passed[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT};
    for (size_t k = 0; k < sizeof passed / sizeof *passed; k++) sigaction(passed[k], &action, NULL);
    if (sendmsg(server, &message, 0) != sizeof length) fail("sendmsg");
    for (size_t at = 0; at < size;) {
        ssize_t n = write(server, words + at, size - at);
        if (n < 0 && errno != EINTR) fail("write");
        if (n > 0) at += (size_t)n;
    }
    size_t got = 0;
    while (got < sizeof status) {
        ssize_t n = read(server, (char *)&status + got, sizeof status - got);
        if (n == 0) exit(127);
        if (n < 0 && errno != EINTR) fail("read");
        if (n > 0) got += (size_t)n;
    }
    if (status < 0) { /* ended by a signal: so does this process */
        signal(-status, SIG_DFL);
        kill(getpid(), -status);
        pause();
    }
    return status;
}
