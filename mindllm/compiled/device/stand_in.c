/* Stand-ins for the device software of Ascend: just enough of it for MindSpore's dry run, which launches nothing.
 *
 * The file that includes this one gives every name the wheel wants to one of these bodies. Most names answer 0, which means
 * success; stand_in_names.py says which do not. Arguments nobody looks at are left out.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DEVICE_BYTES (64ULL << 30)
#define FIRST_DEVICE_ADDRESS 0x100000000000ULL
#define ALIGNMENT 512ULL
#define ERROR_NOT_AVAILABLE 100000

/* Nothing here computes: a program that is not a simulation must not get as far as using it. */
__attribute__((constructor)) static void refuse_anything_but_simulation(void) {
  const char *level = getenv("MS_SIMULATION_LEVEL");
  if (level == NULL || strcmp(level, "1") != 0) {
    fprintf(stderr, "error: these libraries only pretend to be Ascend's, for MS_SIMULATION_LEVEL=1; they compute nothing\n");
    _Exit(2);
  }
}

long stand_in_zero(void) { return 0; }
long stand_in_one(void) { return 1; }
const char *stand_in_text(void) { return ""; }

static char handle[4096];
void *stand_in_pointer(void) { return handle; }
int stand_in_make(void **made) {
  *made = handle;
  return 0;
}

const char *stand_in_soc_name(void) { return "Ascend910B2"; }

/* aclCANNPackageVersion. Graph-kernel fusion (jit_level O1) parses the numbers: an empty text ends it with "stoi". */
struct cann_version {
  char version[128], major[64], minor[64], release[64], patch[64], reserved[128];
};
int stand_in_cann_version(int package, struct cann_version *cann) {
  (void)package;
  memset(cann, 0, sizeof *cann);
  strcpy(cann->version, "8.5.0");
  strcpy(cann->major, "8");
  strcpy(cann->minor, "5");
  strcpy(cann->release, "0");
  strcpy(cann->patch, "0");
  return 0;
}

/* One, unless the program of somebody else is to see the devices of a node. */
int stand_in_device_count(uint32_t *count) {
  const char *devices = getenv("MINDLLM_NODE_DEVICES");
  *count = devices == NULL ? 1 : (uint32_t)atoi(devices);
  return 0;
}

int stand_in_device(int32_t *device) {
  *device = 0;
  return 0;
}

int stand_in_memory(int kind, size_t *available, size_t *total) {
  *available = *total = DEVICE_BYTES;
  return 0;
}

int stand_in_device_malloc(void **address, size_t bytes) {
  static uint64_t next = FIRST_DEVICE_ADDRESS;
  *address = (void *)__atomic_fetch_add(&next, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, __ATOMIC_RELAXED);
  return 0;
}

/* The host's memory is the one thing that is really there. */
int stand_in_host_malloc(void **address, size_t bytes) {
  *address = malloc(bytes);
  return *address == NULL;
}
int stand_in_host_free(void *address) {
  free(address);
  return 0;
}

static void sleep_for_a_moment(void) {
  struct timespec moment = {0, 20000000L};
  nanosleep(&moment, NULL);
}

/* A thread asks for tensors to print, for ever: success would make it read one. */
int stand_in_not_available(void) {
  sleep_for_a_moment();
  return ERROR_NOT_AVAILABLE;
}

/* ge::Operator, returned by value: an object that owns nothing. */
struct operator_object {
  void *words[3];
};
struct operator_object stand_in_operator(void) {
  struct operator_object empty = {{NULL, NULL, NULL}};
  return empty;
}

/* ge::StatusFactory holds a std::map of texts: an empty one of libstdc++ is a header node that is its own left and right. */
struct status_factory {
  void *unused;
  int color;
  void *parent, *left, *right;
  size_t count;
};
static struct status_factory factory;
void *stand_in_status_factory(void) {
  if (factory.left == NULL) factory.left = factory.right = &factory.color;
  return &factory;
}

/* What a thread that waits for callbacks calls for ever: nothing ever arrives, so it had better sleep. */
int stand_in_wait(int milliseconds) {
  (void)milliseconds;
  sleep_for_a_moment();
  return 0;
}
