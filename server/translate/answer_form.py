"""Tools, output format and reasoning of a request → the one grammar that its answer follows, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass

from server.errors import InvalidRequest, NotSupported
from server.plan import ModelText
from server.protocol.chat import ChatRequest
from server.protocol.common import SamplingFields
from server.protocol.constraints import ConstraintFields
from server.structured.calls_grammar import CallRules, calls_rule
from server.structured.compiler import Constraint
from server.structured.grammar import GrammarBuilder
from server.structured.parser import AnswerSyntax
from server.structured.reasoning import after_reasoning, reasoning_of
from server.translate.messages import Rendered, num_json_chars
from server.translate.output_format import OutputFormat, output_format


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Both are None for a free text."""

    constraint: Constraint | None = None
    syntax: AnswerSyntax | None = None


def check_sizes(body: ConstraintFields, model: ModelText) -> None:
    """Before anything is made of them. Raises InvalidRequest."""
    names = [*ConstraintFields.model_fields, *(("tools", "functions") if isinstance(body, ChatRequest) else ())]
    for name in names:
        if (value := getattr(body, name)) is not None:
            model.grammars.check_size(num_json_chars(value), name)


def num_form_chars(body: ConstraintFields) -> int:
    """About how much there is to be read of schemas and grammars."""
    return sum(num_json_chars(getattr(body, name)) for name in ConstraintFields.model_fields)


def completion_form(body: ConstraintFields, model: ModelText) -> AnswerForm:
    """Of an answer that continues a text. Raises InvalidRequest."""
    check_sizes(body, model)
    form = output_format(body)
    if form is None:
        return AnswerForm()
    builder = GrammarBuilder(model.tokenizer)
    return AnswerForm(Constraint(builder.build(form.rule(builder)), form.param))


def chat_form(body: ChatRequest, model: ModelText, rendered: Rendered) -> AnswerForm:
    """Of an answer in a conversation. Raises InvalidRequest."""
    form, use = output_format(body), rendered.tools
    if form is not None and body.continue_final_message:
        raise InvalidRequest(
            f"{form.param}: not with continue_final_message, as it describes the whole answer", param=form.param
        )
    reasoning = None if body.continue_final_message else reasoning_of(rendered.template.sources, rendered.text)
    calls = rendered.calls if use.functions else None
    syntax = None if reasoning is None and calls is None else AnswerSyntax(reasoning, calls)
    builder = GrammarBuilder(model.tokenizer)
    if calls is not None:
        answer = _calls(builder, rendered, form)
    elif form is not None:
        answer = form.rule(builder)
    else:
        return AnswerForm(None, syntax)
    constraint = Constraint(
        builder.build(after_reasoning(builder, reasoning, answer)),
        use.param if form is None else form.param,
        tuple((function.param, function.parameters) for function in use.functions),
    )
    return AnswerForm(constraint, syntax)


def _calls(builder: GrammarBuilder, rendered: Rendered, form: OutputFormat | None) -> str:
    use, calls = rendered.tools, rendered.calls
    text = None
    if form is not None and use.mode == "auto":
        if not calls.after_text:
            raise NotSupported(
                f"{form.param}: not together with tools, as this model's calls cannot be told from such an answer",
                param=form.param,
            )
        text = builder.rule("formed", form.rule(builder))
    parallel = use.parallel and not calls.single
    return calls_rule(builder, calls, CallRules(use.functions, use.mode == "required", parallel, text))


def check_together(body: SamplingFields, constraint: Constraint | None) -> None:
    """What excludes a constraint. Raises InvalidRequest."""
    if constraint is None:
        return
    if body.ignore_eos:
        raise InvalidRequest(
            f"ignore_eos: not with {constraint.param}: the answer ends where it is complete", param="ignore_eos"
        )
    if body.allowed_token_ids is not None:
        raise InvalidRequest(
            f"allowed_token_ids: not with {constraint.param}: both say which tokens may come", param="allowed_token_ids"
        )
