"use strict";
// What was found, and the text: it grows with the steps.

function describeRun() {
  const local = facts.windows.filter((window) => window < facts.context);
  const window = local.length ? `, local window ${local[0]}` : "";
  byId("model").textContent =
    `${plain(facts.model)}: ${plural(LAYERS, "layer")}, ${plural(HEADS, "head")} of ${DIM}${window}; ` +
    `${facts.device}, ${facts.dtype}; a prompt of ${plural(facts.prompt_tokens, "token")}, ` +
    plural(steps.length, "step");
  const verdict = byId("verdict");
  if (facts.fault) describeFault(verdict, facts.fault);
  else if (facts.found) describeDivergence(verdict);
  else describeAgreement(verdict);
}

// The whole lesson in a few sentences, in the numbers of this run.
function describeAgreement(verdict) {
  const sum = (path) => steps.reduce((total, step) => total + step.seconds[path], 0);
  const last = steps.at(-1);
  const token = last.cache_bytes / last.end;
  verdict.append(
    element(
      "p",
      {},
      "To write a token, the model looks back at a key and a value of every token before it. The ",
      element("b", {}, "cached"),
      " path keeps them and makes only the newest; the ",
      element("b", {}, "naive"),
      ` path makes all of them again at every step. Both write the same text: here in ` +
        `${milliseconds(sum("cached"))} with the cache and ${milliseconds(sum("naive"))} without. ` +
        `The price is memory: ${bytes(token)} for each token, ${bytes(last.cache_bytes)} at the end.`,
    ),
  );
}

function placeName({ step, layer, value }) {
  return `step ${step}, ${layer === null ? "" : `layer ${layer}, `}${value}`;
}

function describeDivergence(verdict) {
  verdict.classList.add("fault");
  verdict.append(
    element("p", {}, element("b", {}, "✗ The paths differ"), `, first at ${placeName(facts.found)}.`),
    buttons(),
  );
}

function describeFault(verdict, fault) {
  verdict.classList.add("fault");
  const where = facts.found
    ? `✗ First wrong value: ${placeName(facts.found)}. `
    : "Nothing differs: this text leaves the fault hidden. ";
  let text = "The text stays right: a fault may take its time, so values are compared, not texts.";
  if (fault.wrong_step !== null) text = `✗ The text goes wrong at step ${fault.wrong_step}.`;
  else if (!facts.found) {
    const needed = fault.new_tokens_needed;
    text = `It takes ${fault.needs}${needed ? `: ask for ${needed} new tokens` : ""}.`;
  }
  verdict.append(
    element(
      "p",
      {},
      element("b", {}, `A fault is in the cached path: ${fault.fault}. `),
      `${fault.what} This is a bug that a `,
      element("a", { href: fault.reference, rel: "noreferrer" }, "real program"),
      ` had. How it is run: ${fault.scenario}. Both paths are fed the right text.`,
    ),
    element("p", {}, element("b", {}, where), text),
    ...(facts.breakdown
      ? [element("p", {}, `The cached path breaks down after step ${steps.length - 1}: ${facts.breakdown}.`)]
      : []),
    buttons(),
  );
}

function buttons() {
  const box = element("div", { class: "buttons" });
  const go = (label, place, section) =>
    box.append(element("button", { type: "button", onclick: () => goTo(place, section) }, label));
  const inHead = facts.cell ? "flow" : "check"; // where the first wrong value can be seen
  if (facts.found) go("Go to the first wrong value", firstWrong(), inHead);
  const wrong = facts.fault?.wrong_step ?? null;
  if (wrong !== null && wrong < steps.length) go("Go to where the text goes wrong", { step: wrong }, "text-card");
  return box;
}

function goTo(place, section) {
  pause();
  show(place);
  byId(section).scrollIntoView();
}

// Where the first wrong value is, as what to look at.
function firstWrong() {
  const { step, layer, value } = facts.found;
  const views = { pattern: "pattern", mixed: "mix", values: "mix", new_values: "mix" };
  return {
    step: Math.min(step, steps.length - 1),
    layer: layer ?? 0,
    head: facts.cell?.head ?? 0,
    view: views[value] ?? "scores",
  };
}

// Tokens

function makeText() {
  facts.tokens.forEach((token, position) => {
    const isPrompt = position < facts.prompt_tokens;
    const piece = plain(token.piece) || "‥"; // a part of a character, which comes with the last part
    const button = element(
      "span",
      { role: "button", class: `token ${isPrompt ? "prompt" : "new"}`, title: tokenTitle(position) },
      piece,
    );
    if (!piece.trim()) button.setAttribute("aria-label", quoted(token));
    button.onclick = () => {
      pause();
      show({ step: stepWriting(position) });
    };
    button.onkeydown = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      button.click();
    };
    byId("text").append(button);
  });
}

// The step that has fed a token of the prompt, or written another.
function stepWriting(position) {
  if (position < facts.prompt_tokens) return stepOf[position];
  return steps.find((step) => step.end === position).index;
}

function tokenTitle(position) {
  const { id } = facts.tokens[position];
  const step = stepWriting(position);
  const how = position < facts.prompt_tokens ? "fed" : "written";
  return `${tokenName(position)}: token ${id}, ${how} in step ${step}`;
}

function paintText() {
  const step = steps[state.step];
  [...byId("text").children].forEach((button, position) => {
    button.classList.toggle("later", position > step.end || (position === step.end && !step.yields));
    button.classList.toggle("fed", position >= step.start && position < step.end);
    button.classList.toggle("written", position === step.end && step.yields);
    button.tabIndex = position > step.end ? -1 : 0;
  });
}

// Below the right text, the wrong one: from the first wrong token on it is another.
function makeWrongText(fault) {
  if (fault.wrong_step === null) return;
  const first = fault.first_wrong_token;
  const line = (name, tokens, marked) =>
    element(
      "p",
      { class: "text" },
      element("b", {}, `${name}: `),
      ...tokens.map((token, place) => {
        const classes = `token ${place === first && marked ? "wrong" : ""}`;
        return element("span", { class: classes }, plain(token.piece) || "‥");
      }),
    );
  byId("wrong-text").append(
    line("Right", fault.right, false),
    line("With the fault", fault.wrong, true),
  );
}

describeRun();
makeText();
if (facts.fault) makeWrongText(facts.fault);
painters.push(paintText);
