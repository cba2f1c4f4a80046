// Questions to the head over HTTP.

/** What the head refused, or why it could not be asked. */
export class ApiError extends Error {
  constructor(message, status = 0, hint = null) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.hint = hint;
  }
}

/** The address of a question, for links too: lists are joined by commas, what is unknown is left out. */
export function url(path, params = {}) {
  const words = Object.entries(params)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([word, value]) => [word, Array.isArray(value) ? value.join(",") : String(value)])
    .filter(([, value]) => value !== "");
  return words.length ? `${path}?${new URLSearchParams(words)}` : path;
}

/** Ask the head. Throws an ApiError; an AbortError when the signal said so. */
export async function get(path, params = {}, { signal } = {}) {
  return ask(url(path, params), { signal });
}

/** Tell the head to do something. */
export async function post(path, body = {}, { signal } = {}) {
  return ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
}

/** Show the form that takes the token; the reader comes back to where they were. */
export function login() {
  try {
    sessionStorage.setItem("gpulse.return", location.hash);
  } catch {
    // Then they come back to the front page.
  }
  location.assign("/login");
}

/** Where the reader was before the login, once. */
export function returnTo() {
  try {
    const hash = sessionStorage.getItem("gpulse.return");
    sessionStorage.removeItem("gpulse.return");
    return hash;
  } catch {
    return null;
  }
}

async function ask(address, options) {
  const answer = await reached(address, { headers: { Accept: "application/json" }, ...options });
  if (answer.status === 401) {
    login();
    throw new ApiError("the head wants to know who you are", 401, "log in with its token");
  }
  const document = await answer.json().catch((error) => {
    if (error.name === "AbortError") {
      throw error;
    }
    return null;
  });
  if (!answer.ok) {
    throw new ApiError(document?.error ?? `the head answered ${answer.status}`, answer.status, document?.hint ?? null);
  }
  if (document === null) {
    throw new ApiError("the head's answer could not be read", answer.status, "reload the page");
  }
  return document;
}

async function reached(address, options) {
  try {
    return await fetch(address, { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new ApiError("the head cannot be reached", 0, "is gpulse head still running?");
  }
}
