/*
 * commands/doctor.h - `ling doctor`: whether this machine, and what runs on it, is fit to train.
 */
#ifndef LING_COMMANDS_DOCTOR_H
#define LING_COMMANDS_DOCTOR_H

#include "commands/command.h"

extern const struct command doctor_command;

/* Fails when the matrix products that will be used, OpenBLAS's or ling's own, are wrong on this machine. Without
 * `openblas`, OpenBLAS is tested too and only warned of, since other programs on this machine may use it. */
int check_before_work(bool openblas);

#endif
