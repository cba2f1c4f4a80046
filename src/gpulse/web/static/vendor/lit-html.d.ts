// The type checker finds the types of the vendored file in the package of the same version.
export * from "lit-html";
