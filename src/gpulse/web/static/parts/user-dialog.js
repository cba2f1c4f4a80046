// "Who are you?": asked once, so that a reader's own GPUs can be found.

import { h } from "./dom.js";

/** Ask for a user name; resolves to it, or to "" when the reader would rather not say. */
export function askUser(users, before = "") {
  const input = h("input", { id: "user-name", list: "user-names", autocomplete: "username", spellcheck: "false", required: true, value: before });
  const form = h(
    "form", { method: "dialog" },
    h("h2", { id: "user-title" }, "Which GPUs are yours?"),
    h("p", { class: "muted" }, "Your user name on the nodes. It is kept in this browser only."),
    h("label", { class: "field stacked" }, h("span", {}, "User name"), input),
    h("datalist", { id: "user-names" }, ...users.map((user) => h("option", { value: user }))),
    h(
      "p", { class: "toolbar dialog-buttons" },
      h("button", { class: "button primary", value: "ok" }, "Show my GPUs"),
      h("button", { class: "button quiet", value: "cancel", type: "button" }, "Cancel"),
    ),
  );
  const dialog = h("dialog", { "aria-labelledby": "user-title" }, form);
  document.body.append(dialog);
  form.querySelector("[value=cancel]").addEventListener("click", () => dialog.close("cancel"));
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const isGiven = dialog.returnValue === "ok";
      dialog.remove();
      resolve(isGiven ? input.value.trim() : "");
    });
    dialog.showModal();
    input.select();
  });
}
