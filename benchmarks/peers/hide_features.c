/* Preloaded, it makes the instruction cpuid report AVX2 and nothing newer, so that a library that chooses its code by
 * the processor takes what it takes on an older one. The environment variables of libraries do less: OpenVINO's plugin
 * asks the processor itself and then fails, because oneDNN followed ONEDNN_MAX_CPU_ISA.
 *
 * Linux lets a process ask for a fault at each cpuid ("CPUID faulting": arch_prctl(2), ARCH_SET_CPUID). The handler
 * executes it, clears bits (Intel, Software Developer's Manual, volume 2A, CPUID) and goes on behind it. Threads have
 * what their parent has; a program that is executed is preloaded again. What is compiled for a processor stays so.
 */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define BIT(n) (1u << (n))

static struct sigaction before;

static void answer(int number, siginfo_t* info, void* context) {
  (void)number, (void)info;
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* code = (const unsigned char*)registers[REG_RIP];
  if (code[0] != 0x0f || code[1] != 0xa2) { /* a real fault: it comes again, to whom it came before */
    sigaction(SIGSEGV, &before, NULL);
    return;
  }
  const uint32_t leaf = (uint32_t)registers[REG_RAX], subleaf = (uint32_t)registers[REG_RCX];
  uint32_t a = leaf, b = 0, c = subleaf, d = 0;
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
  if (leaf == 7 && subleaf == 0) {
    a = 0; /* no subleaf 1, which has AVX-VNNI, AVX512-BF16 and newer */
    /* AVX512 F, DQ, IFMA, PF, ER, CD, BW and VL */
    b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
    /* AVX512 VBMI, VBMI2, VNNI, BITALG and VPOPCNTDQ; GFNI */
    c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14) | BIT(8));
    /* AVX512 4VNNIW, 4FMAPS, VP2INTERSECT and FP16; AMX BF16, TILE and INT8 */
    d &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(23) | BIT(22) | BIT(24) | BIT(25));
  } else if (leaf == 7 || leaf == 0x1d || leaf == 0x1e || leaf == 0x24) { /* AMX tiles and their products, AVX10 */
    a = b = c = d = 0;
  } else if (leaf == 0xd && subleaf == 0) {
    a &= BIT(0) | BIT(1) | BIT(2); /* the state that the system saves: x87, SSE and AVX */
  }
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void hide(void) {
  const struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGSEGV, &action, &before);
  if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
    perror("this processor or kernel has no CPUID faulting (flag cpuid_fault), so its features cannot be hidden");
    _exit(1);
  }
}
