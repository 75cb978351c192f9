-- Finds the keys of the wrong type. Writes nothing.
-- KEYS: KEY[]
-- ARGV: types[]
-- Returns {index from 0, problem, index, problem, ...}.
local wrong = {}
for i, key in ipairs(KEY) do
  local problem = problem_of(key, types[i])
  if problem then
    wrong[#wrong + 1] = i - 1
    wrong[#wrong + 1] = problem
  end
end
return wrong
