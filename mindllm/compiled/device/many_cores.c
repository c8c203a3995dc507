/* Has a program find a larger machine: with a single launching thread, which is what two cores get, MindSpore cannot launch the
 * kernels of branches ("Can not build a sub graph which contains ConditionSwitch"), and a program that is not ours cannot be told.
 * Loaded before the C library (LD_PRELOAD), whose functions these are; more of them run than there are cores for.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

#define CORES 16

static long real_sysconf(int name) {
  static long (*real)(int);
  if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, "sysconf");
  return real(name);
}

static int cores(int name) {
  long found = real_sysconf(name);
  return found > CORES ? (int)found : CORES;
}

int get_nprocs(void) { return cores(_SC_NPROCESSORS_ONLN); }
int get_nprocs_conf(void) { return cores(_SC_NPROCESSORS_CONF); }

long sysconf(int name) {
  return name == _SC_NPROCESSORS_ONLN || name == _SC_NPROCESSORS_CONF ? cores(name) : real_sysconf(name);
}
