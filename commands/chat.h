/*
 * commands/chat.h - `ling chat`: a conversation with a model, on a terminal or by a file of messages.
 */
#ifndef LING_COMMANDS_CHAT_H
#define LING_COMMANDS_CHAT_H

#include "commands/command.h"

extern const struct command chat_command;

#endif
