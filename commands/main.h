/*
 * commands/main.h - main, the table of commands, and their options.
 */
#ifndef LING_COMMANDS_MAIN_H
#define LING_COMMANDS_MAIN_H



#endif
