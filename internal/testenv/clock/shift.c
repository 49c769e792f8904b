/*
 * Preloaded into a database server, this shifts the wall clock that it sees by what is in the
 * file CLOCK_SHIFT_FILE: nanoseconds, a native 64-bit integer, which may change at any time.
 * The monotonic clock stays as it is, as it does when an administrator sets a machine's clock.
 * Waits until a time of the wall clock end by the shifted clock, also those that have begun.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static volatile int64_t none, *shift = &none;

__attribute__((constructor)) static void open_shift(void)
{
	const char *path = getenv("CLOCK_SHIFT_FILE");
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	if (fd < 0)
		return; /* a helper outside the folder of the server */
	void *p = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
	if (p != MAP_FAILED)
		shift = p;
	close(fd);
}

static struct timespec add(struct timespec t, int64_t ns)
{
	ns += t.tv_nsec;
	t.tv_sec += ns / SECOND;
	t.tv_nsec = ns % SECOND;
	if (t.tv_nsec < 0) {
		t.tv_nsec += SECOND;
		t.tv_sec--;
	}
	return t;
}

static int before(struct timespec a, struct timespec b)
{
	return a.tv_sec < b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec < b.tv_nsec);
}

int clock_gettime(clockid_t id, struct timespec *t)
{
	int failed = syscall(SYS_clock_gettime, id, t);
	if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
		*t = add(*t, *shift);
	return failed;
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone)
{
	struct timespec t;
	(void)zone;
	clock_gettime(CLOCK_REALTIME, &t);
	tv->tv_sec = t.tv_sec;
	tv->tv_usec = t.tv_nsec / 1000;
	return 0;
}

time_t time(time_t *out)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	if (out)
		*out = t.tv_sec;
	return t.tv_sec;
}

int timespec_get(struct timespec *t, int base)
{
	return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, t) ? base : 0;
}

/* The kernel waits by the true clock: in slices, after each of which the shift is looked at. */
int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m, const struct timespec *restrict until)
{
	static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
	if (!real)
		real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
	if (until->tv_sec < SECOND) /* of the monotonic clock: no wall clock shows 2001 or earlier */
		return real(c, m, until);
	for (;;) {
		struct timespec now, end = add(*until, -*shift);
		syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
		struct timespec slice = add(now, SECOND / 20);
		if (!before(slice, end))
			return real(c, m, &end);
		int failed = real(c, m, &slice);
		if (failed != ETIMEDOUT)
			return failed;
	}
}

int pthread_cond_clockwait(pthread_cond_t *c, pthread_mutex_t *m, clockid_t id, const struct timespec *until)
{
	static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
	if (id == CLOCK_REALTIME)
		return pthread_cond_timedwait(c, m, until);
	if (!real)
		real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
	return real(c, m, id, until);
}
