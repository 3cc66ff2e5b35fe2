/*
 * commands/manual.c - the manual page and the completion for bash, made from the tables of the commands.
 */
#define _GNU_SOURCE
#include "commands/manual.h"

#include "ling.h"
#include "commands/options.h"

#include <stdlib.h>
#include <string.h>

/* Prints n bytes of text so that roff takes each character for itself. A line of the text is a line of the page. */
static void print_roff(FILE *out, const char *text, size_t n)
{
	static const struct { char c; const char *roff; } escapes[] = {{'\\', "\\e"}, {'-', "\\-"}, {'\'', "\\(aq"},
			{'`', "\\(ga"}, {'^', "\\(ha"}, {'~', "\\(ti"}};
	enum { NUM_ESCAPES = sizeof escapes / sizeof *escapes };
	if (n && text[0] == '.')
		fputs("\\&", out); /* else a request */
	for (size_t i = 0; i < n; i++) {
		int e = 0;
		while (e < NUM_ESCAPES && escapes[e].c != text[i])
			e++;
		if (e < NUM_ESCAPES)
			fputs(escapes[e].roff, out);
		else
			fputc(text[i], out);
		if (text[i] == '\n' && i + 1 < n && text[i + 1] == '.')
			fputs("\\&", out);
	}
}

static void print_paragraph(FILE *out, const char *text)
{
	print_roff(out, text, strlen(text));
	fputc('\n', out);
}

static void print_option(FILE *out, const struct command_option *o)
{
	char *help = option_help(o);
	fputs(".TP\n\\fB\\-\\-", out);
	print_roff(out, o->name, strlen(o->name));
	fputs("\\fR", out);
	if (o->argument) {
		fputs("=\\fI", out);
		print_roff(out, o->argument, strlen(o->argument));
		fputs("\\fR", out);
	}
	fputc('\n', out);
	print_paragraph(out, help);
	free(help);
}

void manual_print(FILE *out, const struct command *const *commands, int num_commands)
{
	fprintf(out, ".TH LING 1 \"\" \"ling %s\" \"User Commands\"\n", LING_VERSION);
	fputs(".SH NAME\nling \\- train and evaluate Ling\\-style mixture\\-of\\-experts language models on CPUs\n"
			".SH SYNOPSIS\n.B ling\n\\fICOMMAND\\fR ...\n.br\n.B ling\n\\fICOMMAND\\fR \\fB\\-\\-help\\fR\n.br\n"
			".B ling \\-\\-version\n.SH COMMANDS\n", out);
	for (int i = 0; i < num_commands; i++) {
		const struct command *c = commands[i];
		fputs(".SS ", out);
		print_paragraph(out, c->name);
		for (const char *way = c->usage; way; way = strchr(way, '\n') ? strchr(way, '\n') + 1 : NULL) {
			fputs("\\fBling ", out);
			print_roff(out, c->name, strlen(c->name));
			fputs("\\fR ", out);
			print_roff(out, way, strcspn(way, "\n"));
			fputs("\n.br\n", out);
		}
		fputs(".PP\n", out);
		print_paragraph(out, c->help);
		for (int j = 0; j < c->num_options; j++)
			print_option(out, &c->options[j]);
	}
	fprintf(out, ".SH EXIT STATUS\n%d: done. %d: the work failed. %d: wrong use. %d: a signal stopped a training run, "
			"which has saved; the same command continues. %d: a training run cannot go on from here, but from an "
			"earlier checkpoint.\n", EXIT_DONE, EXIT_WORK_FAILED, EXIT_WRONG_USE, EXIT_STOPPED, EXIT_GO_BACK);
	fputs(".SH ENVIRONMENT\n.TP\n.B OMP_NUM_THREADS\nThreads of a process (default: all cores).\n"
			".TP\n.B LING_PRODUCTS\n", out);
	print_paragraph(out, "openblas: OpenBLAS computes most matrix products, instead of ling's own code.");
	fputs(".SH SEE ALSO\n.BR mpirun (1)\n", out);
}

/* Prints the names of a command's options as words. */
static void print_options(FILE *out, const struct command *c)
{
	for (int i = 0; i < c->num_options; i++)
		fprintf(out, "--%s ", c->options[i].name);
	fprintf(out, "--help");
}

void completion_print(FILE *out, const struct command *const *commands, int num_commands)
{
	fprintf(out, "# Completion of ling's command line for bash, made by `ling --completion` of ling %s.\n"
			"_ling()\n{\n"
			"\tlocal word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} words=\n"
			"\tCOMPREPLY=()\n"
			"\t# In --option=value the = is a word of its own.\n"
			"\t[ \"$before\" = = ] && before=${COMP_WORDS[COMP_CWORD - 2]}\n"
			"\t[ \"$word\" = = ] && word=\n"
			"\tif [ \"$COMP_CWORD\" = 1 ]; then\n\t\twords=\"", LING_VERSION);
	for (int i = 0; i < num_commands; i++)
		fprintf(out, "%s ", commands[i]->name);
	fputs("--help --version --man --completion\"\n\telse\n\t\tcase ${COMP_WORDS[1]} in\n", out);
	for (int i = 0; i < num_commands; i++) {
		fprintf(out, "\t\t%s)\n\t\t\t[[ $word == -* ]] && words=\"", commands[i]->name);
		print_options(out, commands[i]);
		fputs("\" ;;\n", out);
	}
	fputs("\t\tesac\n\t\tcase ${COMP_WORDS[1]}:$before in\n", out);
	for (int i = 0; i < num_commands; i++)
		for (int j = 0; j < commands[i]->num_options; j++) {
			const struct command_option *o = &commands[i]->options[j];
			if (o->type != OPTION_CHOICE)
				continue;
			fprintf(out, "\t\t%s:--%s) words=\"", commands[i]->name, o->name);
			for (int k = 0; o->choices[k]; k++)
				fprintf(out, "%s%s", k ? " " : "", o->choices[k]);
			fputs("\" ;;\n", out);
		}
	fputs("\t\tesac\n\tfi\n\tmapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$word\")\n}\n"
			"complete -o default -F _ling ling\n", out);
}
