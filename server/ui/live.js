// The engine as it works: reads the event stream and draws the latest steps.
const $ = (id) => document.getElementById(id);
const COLUMN = 6, SHOWN = 120, STATES = ["private", "shared", "cached", "free"];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Keeps a connection until stop() is called.
export function watch(headers, events) {
  const abort = new AbortController();
  const view = { steps: [], lanes: new Map(), free: [], maxLanes: 0, levels: [], tree: [] };
  (async () => {
    while (!abort.signal.aborted) {
      try {
        const response = await fetch("ui/live", { headers: headers(), signal: abort.signal });
        if (!response.ok) throw new Error((await response.json()).error.message);
        $("state").textContent = "connected";
        for await (const news of events(response)) take(view, news);
        $("state").textContent = "connection lost";
      } catch (error) {
        if (abort.signal.aborted) return;
        $("state").textContent = error.message;
      }
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  })();
  return { stop: () => abort.abort() };
}

function take(view, news) {
  for (const step of news.steps) {
    place(view, step);
    view.steps.push(step);
  }
  view.steps.splice(0, Math.max(0, view.steps.length - SHOWN));
  view.levels.push([news.running, news.waiting]);
  view.levels.splice(0, Math.max(0, view.levels.length - 360));
  $("running").textContent = news.running;
  $("waiting").textContent = news.waiting;
  $("rate").textContent = Math.round(news.tokens_per_second);
  $("steps").textContent = Math.round(news.steps_per_second);
  $("hits").textContent = news.hit_ratio === null ? "–" : `${Math.round(news.hit_ratio * 100)} %`;
  const latest = view.steps.at(-1);
  if (news.steps.length && latest) {
    $("timeline").setAttribute("aria-label", `Step ${latest.id}: ${latest.decodes} decodes, `
      + `${latest.seqs.length - latest.decodes} prompt chunks`);
    $("timeline").dataset.step = latest.id;
  }
  view.tree = news.tree ?? view.tree;
  requestAnimationFrame(() => draw(view, news));
}

// A sequence keeps its lane from the step it joins in to the one it is missing from.
function place(view, step) {
  const present = new Set(step.seqs.map(([request, choice]) => `${request}.${choice}`));
  for (const [name, lane] of view.lanes) {
    if (!present.has(name)) { view.lanes.delete(name); view.free.push(lane); }
  }
  view.free.sort((a, b) => b - a);
  step.cells = step.seqs.map(([request, choice, tokens], index) => {
    const name = `${request}.${choice}`;
    if (!view.lanes.has(name)) view.lanes.set(name, view.free.pop() ?? view.maxLanes++);
    return [view.lanes.get(name), tokens, index < step.decodes];
  });
}

// A canvas as sharp as the screen, cleared; in CSS pixels.
function canvas(id) {
  const element = $(id), ratio = devicePixelRatio || 1;
  const width = element.clientWidth, height = element.clientWidth * (Number(element.getAttribute("data-ratio")
    ?? (element.dataset.ratio = element.height / element.width)));
  if (element.width !== Math.round(width * ratio)) {
    element.width = Math.round(width * ratio);
    element.height = Math.round(height * ratio);
  }
  const context = element.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}

function draw(view, news) {
  drawTimeline(view);
  drawBlocks(news.kv);
  drawTree(view.tree);
  drawQueue(view.levels);
}

function drawTimeline(view) {
  const [context, width, height] = canvas("timeline");
  const lanes = Math.max(8, ...view.steps.flatMap((step) => step.cells.map(([lane]) => lane + 1)));
  const size = height / lanes, decode = css("decode"), prefill = css("prefill");
  const columns = Math.min(view.steps.length, Math.floor(width / COLUMN));
  view.steps.slice(-columns).forEach((step, index) => {
    const x = width - (columns - index) * COLUMN;
    for (const [lane, tokens, isDecode] of step.cells) {
      const part = isDecode ? 0.35 : Math.min(1, 0.4 + Math.log2(tokens + 1) / 14);
      context.fillStyle = isDecode ? decode : prefill;
      context.fillRect(x, lane * size + (size * (1 - part)) / 2, COLUMN - 1, Math.max(1, size * part));
    }
  });
}

function drawBlocks(groups) {
  const [context, width, height] = canvas("blocks");
  const total = groups.map((group) => STATES.reduce((sum, state) => sum + group[state], 0));
  $("block-legend").replaceChildren(...STATES.flatMap((state) => {
    const key = document.createElement("span");
    key.className = `key ${state}`;
    return [key, `${state} ${groups.map((group) => group[state]).join(" + ")}`];
  }));
  const band = height / Math.max(1, groups.length);
  groups.forEach((group, row) => {
    // square cells that fill the band, each standing for as many blocks as it must
    const size = Math.max(4, Math.floor(Math.sqrt((width * band) / Math.max(1, total[row]))));
    const columns = Math.floor(width / size), cells = Math.min(total[row], columns * Math.floor(band / size));
    let index = 0, sum = 0;
    for (const state of STATES) {
      sum += group[state];
      context.fillStyle = css(state);
      for (; index < Math.round((sum / Math.max(1, total[row])) * cells); index++) {
        context.fillRect((index % columns) * size, row * band + Math.floor(index / columns) * size, size - 1, size - 1);
      }
    }
  });
}

// An icicle: each branch as wide as its own tokens and as high as its share of all that begins with it.
function drawTree(branches) {
  const [context, width, height] = canvas("tree");
  const roots = branches.filter(([parent]) => parent < 0);
  const total = roots.reduce((sum, [, , , subtree]) => sum + subtree, 0);
  const longest = Math.max(1, ...branches.map(([, start, own]) => start + own));
  $("tree").setAttribute("aria-label", `Prefix cache: ${roots.length} branches at the root, ${total} tokens shown`);
  $("tree").dataset.branches = branches.length;
  const used = new Map([[-1, 0]]), tops = [], unit = height / Math.max(1, total);
  branches.forEach(([parent, start, own, subtree, sequences], index) => {
    const offset = used.get(parent) ?? 0;
    used.set(parent, offset + subtree);
    tops[index] = (parent < 0 ? 0 : tops[parent]) + offset * unit;
    context.fillStyle = css(sequences ? "shared" : "cached");
    const x = (start / longest) * width, high = Math.max(1, subtree * unit - 1);
    context.fillRect(x, tops[index], Math.max(1, (own / longest) * width - 1), high);
    context.fillStyle = css("paper");
    if (high > 11 && own / longest * width > 40) context.fillText(`${own}`, x + 4, tops[index] + Math.min(high - 2, 11));
  });
}

function drawQueue(levels) {
  const [context, width, height] = canvas("queue");
  const most = Math.max(4, ...levels.map(([running, waiting]) => running + waiting));
  levels.forEach(([running, waiting], index) => {
    const x = width - (levels.length - index) * 2, unit = (height - 2) / most;
    context.fillStyle = css("decode");
    context.fillRect(x, height - running * unit, 2, running * unit);
    context.fillStyle = css("prefill");
    context.fillRect(x, height - (running + waiting) * unit, 2, waiting * unit);
  });
}
