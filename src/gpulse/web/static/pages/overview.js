// The front page: every node a card. Only what is in view is kept up to date; the rest when it comes into view.

import { MissingCard, NodeCard } from "../parts/card.js";
import { h, oncePerFrame, setChildren, setHidden } from "../parts/dom.js";
import { Matcher, order } from "../parts/filter.js";
import { QuickBar } from "../parts/quickbar.js";

const NEAR = "600px 0px";
const IN_VIEW = "60px 0px";
const MOST_BUILT = 150;
const SORT_AGAIN_MS = 10_000;

/** The page's title. */
export const title = () => "Overview";

/** Show the page. */
export function mount(root, route, app) {
  const page = new Overview(root, app);
  return {
    wish: {},
    leave: () => page.leave(),
    rerouted: () => page.rerouted(),
  };
}

class Overview {
  constructor(root, app) {
    this._app = app;
    this._cards = new Map();
    this._near = new Set();
    this._inView = new Set();
    this._dirty = new Set();
    this._bar = new QuickBar(app, { changed: () => this._arrange(), jump: (name) => this._jump(name) });
    this._grid = h("div", { class: "grid-cards", id: "nodes" });
    this._empty = h("div", { class: "empty", id: "nothing", hidden: true });
    this._frame = oncePerFrame(() => this._draw());
    this._builder = new IntersectionObserver((entries) => this._cameNear(entries), { rootMargin: NEAR });
    this._viewer = new IntersectionObserver((entries) => this._cameIntoView(entries), { rootMargin: IN_VIEW });
    root.append(h("h1", { class: "visually-hidden" }, "Overview"), this._bar.element, this._empty, this._grid);
    this._abort = new AbortController();
    const { signal } = this._abort;
    app.fleet.addEventListener("structure", () => this._structure(), { signal });
    app.fleet.addEventListener("values", (event) => this._values(event.detail), { signal });
    app.live.addEventListener("state", () => this._tellEmpty(), { signal });
    this._clock = setInterval(() => this._tick(), 1000);
    this._sorter = setInterval(() => this._bar.filter.sort === "free" && this._structure(), SORT_AGAIN_MS);
    this._structure();
  }

  leave() {
    clearInterval(this._clock);
    clearInterval(this._sorter);
    this._abort.abort();
    this._frame.cancel();
    this._builder.disconnect();
    this._viewer.disconnect();
    this._bar.leave();
    this._cards.clear();
    this._near.clear();
    this._inView.clear();
  }

  rerouted() {
    this._bar.rerouted();
  }

  /** Nodes or GPUs came or went: make cards, let go of cards, put them in order. */
  _structure() {
    const { fleet } = this._app;
    for (const [name, card] of this._cards) {
      if (card.node !== fleet.nodes.get(name) || (!card.node && !fleet.missing.includes(name))) {
        this._forget(name, card);
      }
    }
    for (const node of fleet.nodes.values()) {
      const card = this._cards.get(node.name);
      if (card === undefined) {
        this._add(node.name, new NodeCard(node, fleet));
      } else if (card.gpus !== node.gpus) {
        card.rebuild();
      }
      this._cards.get(node.name).gpus = node.gpus;
    }
    for (const name of fleet.missing) {
      if (!this._cards.has(name)) {
        this._add(name, new MissingCard(name));
      }
    }
    this._bar.structure();
    this._arrange();
  }

  _add(name, card) {
    this._cards.set(name, card);
    this._builder.observe(card.element);
    this._viewer.observe(card.element);
  }

  _forget(name, card) {
    this._builder.unobserve(card.element);
    this._viewer.unobserve(card.element);
    card.element.remove();
    this._cards.delete(name);
    this._near.delete(name);
    this._inView.delete(name);
  }

  /** Order the cards and leave out what the filter does not show. */
  _arrange() {
    const names = order(this._app.fleet, this._bar.filter);
    setChildren(this._grid, names.map((name) => this._cards.get(name).element));
    this._matcher = new Matcher(this._bar.filter);
    for (const name of names) {
      this._match(name);
    }
    this._tellEmpty();
  }

  _match(name) {
    const card = this._cards.get(name);
    if (!card.node) {
      setHidden(card.element, !this._matcher.missing(name));
      return;
    }
    const gpus = this._matcher.gpus(card.node);
    setHidden(card.element, gpus === null);
    if (gpus !== null) {
      card.show(this._matcher.isActive ? gpus : null);
    }
  }

  _values(names) {
    for (const name of names) {
      this._dirty.add(name);
    }
    this._frame();
  }

  _tick() {
    this._isTick = true;
    this._frame();
  }

  /** What changed since the last frame, all at once. */
  _draw() {
    const dirty = this._dirty;
    this._dirty = new Set();
    if (dirty.size) {
      this._bar.values(dirty);
      if (this._matcher.isActive) {
        for (const name of dirty) {
          this._match(name);
        }
        this._tellEmpty();
      }
    }
    const now = this._app.fleet.headTime();
    for (const name of this._inView) {
      const card = this._cards.get(name);
      if (dirty.has(name)) {
        card.update?.();
      } else if (this._isTick) {
        card.tick?.(now);
      }
    }
    this._isTick = false;
  }

  /** Cards that came near are built; of those far away some are let go. */
  _cameNear(entries) {
    for (const entry of entries) {
      const name = entry.target.dataset.node;
      const card = this._cards.get(name);
      if (!card?.node) {
        continue;
      }
      card.height = entry.boundingClientRect.height;
      if (!entry.isIntersecting) {
        this._near.delete(name);
      } else {
        this._near.add(name);
        if (!card.isBuilt) {
          card.build();
        }
      }
    }
    this._letGo();
  }

  /** Only cards in view follow what happens; who comes into view is brought up to date. */
  _cameIntoView(entries) {
    for (const { target, isIntersecting } of entries) {
      const name = target.dataset.node;
      if (isIntersecting && this._cards.get(name)?.node) {
        this._inView.add(name);
        this._dirty.add(name);
      } else {
        this._inView.delete(name);
      }
    }
    this._frame();
  }

  _letGo() {
    const built = [...this._cards].filter(([, card]) => card.isBuilt);
    let over = built.length - MOST_BUILT;
    for (const [name, card] of built) {
      if (over > 0 && !this._near.has(name) && !card.element.contains(document.activeElement)) {
        card.unbuild(card.height);
        over -= 1;
      }
    }
  }

  _jump(name) {
    const card = this._cards.get(name);
    if (card) {
      setHidden(card.element, false);
      card.element.scrollIntoView({ block: "start", behavior: "instant" });
      card.element.focus({ preventScroll: true });
      this._app.announce(`At ${name}`);
    }
  }

  _tellEmpty() {
    const { fleet, live } = this._app;
    const isAny = [...this._cards.values()].some((card) => !card.element.hidden);
    setHidden(this._empty, isAny);
    if (isAny) {
      return;
    }
    if (this._cards.size) {
      this._empty.replaceChildren(h("p", {}, "Nothing matches the filter. Press Esc to clear it."));
    } else if (fleet.known) {
      this._empty.replaceChildren(
        h("p", {}, "No node has been heard of yet."),
        h("p", {}, "On every node: ", h("code", {}, `gpulse agent ${location.hostname}:8090`)),
        h("p", {}, "Or on all of them at once: ", h("code", {}, "gpulse deploy up --nodes node-list.txt")),
      );
    } else {
      this._empty.replaceChildren(h("p", {}, live.state === "lost" ? "The head cannot be reached." : "Asking the head …"));
    }
  }
}
